"""Work that each rank does by itself: where it fails on one, it fails on all, at the end of the phase.

A rank that raised and left would keep the others waiting for it in their next collective. A collective that
fails because another rank has gone is told as that, in place of the transport's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from grpox.errors import GrpoxError, RunFailed, describe, text_of
from grpox.runtime.phases import WAITING, PhaseTimes
from grpox.runtime.world import World

Item = TypeVar("Item")

MARKS = ("gloo", "connection closed by peer", "connection reset by peer", "timed out waiting", "nccl")
"""Words that the transports' messages have in common; gloo raises a plain RuntimeError."""


@dataclass(frozen=True)
class Failure:
    """How a rank's work failed, as it travels between ranks."""

    told: str


def gathered(world: World, times: PhaseTimes, work: Callable[[], Item]) -> list[Item]:
    """The result of `work` on every rank, in rank order; a collective after the work.

    Args:
        work: needs no other rank, or goes on with the collectives that it began even where it fails.
        times: knows the phase in which it failed.

    Raises:
        RunFailed: the work failed on other ranks only.
        Exception: on a rank where it failed, what it raised.
    """
    if world.size == 1:
        return [work()]
    part: Item | Failure
    error = None
    try:
        part = work()
    except Exception as raised:  # noqa: BLE001 - raised again when the others know
        part, error = Failure(f"rank {world.rank} failed in phase '{times.failed}': {told(raised)}"), raised
    with times.phase(WAITING):
        parts = world.gather([part])
    if error is not None:
        raise error
    if failures := [each.told for each in parts if isinstance(each, Failure)]:
        raise RunFailed("\n".join(failures))
    return [each for each in parts if not isinstance(each, Failure)]


def on_every_rank(world: World, times: PhaseTimes, work: Callable[[], Item]) -> Item:
    """This rank's own result of `work`, which need not be one that can be sent; else as `gathered`."""
    own: list[Item] = []
    gathered(world, times, lambda: own.append(work()))
    return own[0]


def told(error: BaseException) -> str:
    """What an exception says, in a line or more; those that are not written for the user with their type."""
    return str(error) if isinstance(error, GrpoxError) else describe(error)


@contextmanager
def lost_ranks_told(world: World, times: PhaseTimes) -> Iterator[None]:
    """Within this block a collective that loses another rank raises RunFailed."""
    try:
        yield
    except RuntimeError as error:
        text = text_of(error)
        is_transport = isinstance(error, dist.DistError) or any(mark in text.lower() for mark in MARKS)
        if world.size == 1 or not is_transport:
            raise
        raise RunFailed(
            f"rank {world.rank} lost another rank in phase '{times.failed}': that one has ended, or did not "
            f"come in time; its own message tells why\n    {' '.join(text.split())[:300]}"
        ) from error
