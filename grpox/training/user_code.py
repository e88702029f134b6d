"""User code of a run beside plugins' components: reward functions, environments and tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpox.rollout.rewards.isolation import OF_EVALUATION, OF_TRAINING, reward_functions
from grpox.runfile.load import ResolvedRun

if TYPE_CHECKING:
    from grpox.training.episodes import RunEpisodes


@dataclass(frozen=True)
class UserCode:
    """Functions and environments of a run, ready to be called until the run ends."""

    rewards: Sequence[Any]
    """Reward functions of training, in the order of the run file."""
    of_evaluation: Sequence[Any]
    """Reward functions of the evaluation; empty if those of training score it."""
    episodes: RunEpisodes | None
    """Environments and tools; None if each completion is one turn."""


@contextmanager
def open_user_code(run: ResolvedRun) -> Iterator[UserCode]:
    """Build reward functions and open environments, whose processes end with the block.

    Raises:
        ConfigError: one cannot be built, or not where the run file says.
    """
    with (
        reward_functions(run, OF_TRAINING) as rewards,
        reward_functions(run, OF_EVALUATION) as of_evaluation,
        open_episodes(run) as episodes,
    ):
        yield UserCode(rewards, of_evaluation, episodes)


@contextmanager
def open_episodes(run: ResolvedRun) -> Iterator[RunEpisodes | None]:
    """Open the environments of a run, if it has any."""
    if not run.config.has_episodes:
        yield None
        return
    # Imported here, because most runs have none.
    from grpox.training.episodes import opened_episodes

    with opened_episodes(run) as episodes:
        yield episodes
