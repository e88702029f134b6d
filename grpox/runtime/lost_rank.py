"""A collective that fails because another rank has gone: told as that, in place of the transport's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from grpox.errors import RunFailed, text_of
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World

MARKS = ("gloo", "connection closed by peer", "connection reset by peer", "timed out waiting", "nccl")
"""What the transports' messages have in common; gloo raises a plain RuntimeError."""


@contextmanager
def lost_ranks_told(world: World, times: PhaseTimes) -> Iterator[None]:
    """Within this block a collective that loses another rank raises RunFailed."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not _is_transport(error):
            raise
        phase = times.failed
        words = " ".join(text_of(error).split())[:300]
        raise RunFailed(
            f"rank {world.rank} lost another rank in phase '{phase}': that one has ended, or did not come "
            f"in time; its own message tells why\n    {words}"
        ) from error


def _is_transport(error: RuntimeError) -> bool:
    text = text_of(error).lower()
    return isinstance(error, dist.DistError) or any(mark in text for mark in MARKS)
