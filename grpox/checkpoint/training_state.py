"""The part of a run under way that a checkpoint saves, and restores when the run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from grpox.contracts import RunContext
    from grpox.data.prompt_cursor import PromptDraws
    from grpox.data.schedule import Schedule
    from grpox.observing.early_stop import EarlyStop
    from grpox.rollout.prefetch import Begun
    from grpox.runtime.phases import PhaseTimes
    from grpox.runtime.world import World
    from grpox.update.micro_batch import Slice
    from grpox.update.policy_update import PolicyUpdate


class TrainingState(Protocol):
    """`grpox.training.trainer.Trainer`, as far as a checkpoint is concerned with it."""

    context: RunContext
    world: World
    schedule: Schedule
    policy: PolicyUpdate
    pad_token_id: int
    slices: dict[tuple[int, int], Slice]
    """This rank's micro-batches that are not used up, by generation and first row."""
    begun: dict[int, Begun]
    """Generation batches that are being sampled."""
    draws: PromptDraws | None
    num_tokens: int
    before: dict[str, float]
    """Metrics of the evaluation before the first step."""
    after: dict[str, float]
    """Metrics of the last evaluation."""
    early_stop: EarlyStop | None
    latest: dict[str, float]
    """Metrics of the last step; on rank 0."""
    seconds_before: float
    """Seconds of training before the checkpoint that the run went on from."""

    @property
    def times(self) -> PhaseTimes:
        """The phases of a step."""
        ...

    @property
    def ended(self) -> bool:
        """True when the run takes no further step."""
        ...

    def seconds(self) -> float:
        """Return the seconds of training so far, those before a resumed checkpoint included."""
        ...
