"""Steps whose loss or gradient is not finite: the run ends, or goes on without them.

A message names the term of the loss and the token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpox.config import TrainConfig
from grpox.errors import RunFailed
from grpox.errors.formatting import pluralize
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.world import World

if TYPE_CHECKING:
    from grpox.policy.batch import Sample
    from grpox.update.token_metrics import Passes

TERMS = (
    "reference log-probability",
    "log-probability",
    "old log-probability",
    "entropy",
    "advantage",
    "correction R",
    "policy loss",
    "KL",
    "derivative",
)
"""Terms of a loss, causes before consequences."""


@dataclass(frozen=True)
class NonFinite:
    """The first number of a term that is not finite, on one rank. All indices count from 0."""

    term: str
    value: str
    """``nan``, ``inf`` or ``-inf``."""
    rank: int
    micro_batch: int
    row: int
    """Row of the micro-batch on this rank."""
    token: int
    """Position in the completion."""
    count: int
    """Tokens of this rank for which the term is not finite."""

    def __str__(self) -> str:
        more = f" (and at {pluralize(self.count - 1, 'other token')})" if self.count > 1 else ""
        return f"{self.term} {self.value} at {self.where}{more}"

    @property
    def where(self) -> str:
        return f"rank {self.rank}, micro-batch {self.micro_batch}, row {self.row}, token {self.token}"


Row = tuple[Mapping[str, Tensor], Tensor]
"""Terms of one sequence (name -> f32[T]) and its token mask, bool[T]."""


def find(micro_batches: Iterable[Sequence[Row]], rank: int) -> list[NonFinite]:
    """Return the first number that is not finite of each term in a rank's micro-batches, causes first."""
    first: dict[str, NonFinite] = {}
    for place, rows in enumerate(micro_batches):
        for number, (terms, mask) in enumerate(rows):
            for name, values in terms.items():
                bad = mask & ~torch.isfinite(values)
                count = int(bad.sum())
                if not count:
                    continue
                token = int(bad.nonzero()[0])
                new = NonFinite(name, str(values[token].item()), rank, place, number, token, 0)
                known = first.get(name, new)
                first[name] = replace(known, count=known.count + count)
    return in_order(list(first.values()))


def terms_of_rows(micro_batches: Sequence[Sequence[Sample]], passes: Passes) -> list[list[Row]]:
    """List the terms of each sample's loss, by micro-batch of the schedule."""
    of_sample: dict[int, Row] = {}
    for batch, result in passes:
        of_batch = zip(batch.samples, batch.rows(result.terms()), strict=True)
        of_sample |= {id(sample): row for sample, row in of_batch}
    return [[of_sample[id(sample)] for sample in samples] for samples in micro_batches]


def in_order(nonfinite: Sequence[NonFinite]) -> list[NonFinite]:
    """Sort by cause, then by rank."""
    return sorted(nonfinite, key=lambda each: (TERMS.index(each.term), each.rank))


MOST_NAMED = 4
"""Terms that a message names."""


@dataclass
class SkippedSteps:
    """Steps of a run that were not taken."""

    total: int = 0
    in_a_row: int = 0
    """Skipped steps since the last applied one."""


@dataclass
class NonFinitePolicy:
    """Counts the steps that were not taken, saves their batches, and ends the run if configured."""

    config: TrainConfig
    world: World
    dump: Callable[..., str] | None = None
    """Saves a batch, with the last arguments of `grpox.checkpoint.faults.dump_fault`; None: saves nothing."""
    warn: WarnOnce = field(default_factory=lambda: WarnOnce(get_logger(__name__)))
    skipped: SkippedSteps = field(default_factory=SkippedSteps)

    def on_step_applied(self) -> None:
        """Reset the count of steps skipped in a row."""
        self.skipped.in_a_row = 0

    def metrics(self) -> dict[str, float]:
        """Return the number of steps skipped so far, in a run that may skip any."""
        return {"skipped_steps": float(self.skipped.total)} if self.config.on_nonfinite == "skip" else {}

    def on_step_skipped(
        self,
        step: int,
        loss: float,
        micro_batches: Sequence[Sequence[Sample]],
        passes: Passes,
        coefficients: Mapping[str, float],
    ) -> None:
        """Count a step that was not taken, and save its batch; a collective.

        Args:
            step: its number.
            loss: loss of the step; if it is finite, the gradient is not.
            micro_batches: this rank's, as they were before the step.
            passes: the same samples as they went through the model.
            coefficients: keys of `train` -> the weights of the terms in the step's loss.

        Raises:
            RunFailed: the run should end.
        """
        nonfinite = in_order(self.world.gather(find(terms_of_rows(micro_batches, passes), self.world.rank)))
        self.skipped.total += 1
        self.skipped.in_a_row += 1
        what = "the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        message = f"{what} in step {step}{_where(nonfinite)}"
        if self.dump is not None:
            message += f"\n    {self.dump(step, what, nonfinite, micro_batches, coefficients)}"
        if self.config.on_nonfinite == "stop":
            hint = "train.on_nonfinite=skip goes on without such steps"
            raise RunFailed(f"{message}\n    no weight was changed; {hint} (docs/numerical-faults.md)")
        if self.skipped.in_a_row >= self.config.max_skips_in_a_row:
            row = f"{pluralize(self.skipped.in_a_row, 'step')} in a row"
            raise RunFailed(f"{message}\n    the run ends: {row} were not taken (train.max_skips_in_a_row)")
        if self.world.is_main:
            self.warn(f"skipped {step}", f"{message}\n    the step is skipped, as train.on_nonfinite says")


def _where(nonfinite: Sequence[NonFinite]) -> str:
    """Format the first number of each term, causes first."""
    if not nonfinite:
        return ": the loss and its derivatives are finite, the backward pass of the model is not"
    first = list({each.term: each for each in reversed(nonfinite)}.values())[::-1]
    return ": " + "; ".join(str(each) for each in first[:MOST_NAMED])
