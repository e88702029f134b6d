"""The message by which a rank tells the others that its work failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpox.errors import RankLost, RunFailed
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World, run_and_gather, translate_lost_ranks


class SentParts(World):
    """A rank of two that gathers its own parts alone, and lists what it sends."""

    def gather(self, parts: Any) -> Any:
        sent.extend(parts)
        return list(parts)


sent: list[Any] = []


def fail() -> None:
    raise RunFailed("loss 'Mine' raised KeyError: 'cap'")


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ("update", "rank 1 failed in phase 'update': loss 'Mine' raised KeyError: 'cap'"),
        (None, "rank 1 failed: loss 'Mine' raised KeyError: 'cap'"),
    ],
)
def test_the_phase_is_named_where_there_is_one(phase: str | None, message: str) -> None:
    sent.clear()
    times = PhaseTimes()

    def work() -> None:
        if phase is None:
            fail()
        with times.phase(phase or ""):
            fail()

    with pytest.raises(RunFailed, match="KeyError"):
        run_and_gather(SentParts(1, 2, torch.device("cpu")), times, work)
    assert sent == [(message, [])]


def test_a_rank_that_is_lost_between_phases_is_told_so() -> None:
    world = World(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(RankLost, match="in phase 'between phases'"), translate_lost_ranks(world, PhaseTimes()):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:5")
