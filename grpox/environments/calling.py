"""Calls of users' functions, sync or async, within limits of time.

A call is a generator: it yields the awaitables that are to run together and receives how each ended. So one
implementation serves a process that runs one environment, and the trainer, which awaits those of many at once.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

Result = TypeVar("Result")
CANCEL_SECONDS = 1.0
"""Seconds that a cancelled coroutine has to end; after them nobody waits for it."""


class CallTimeout(BaseException):
    """Raised within a call that takes too long; no Exception, so that ``except Exception`` does not stop it."""


@dataclass(frozen=True)
class Settled:
    """The end of a call."""

    value: Any = None
    error: BaseException | None = None
    """The exception that it raised."""
    is_late: bool = False
    """True if its time limit ended it."""
    seconds: float = 0.0


Work = Generator[list[Awaitable[Any]], list[Settled], Result]
"""Work that yields awaitables to run together, receives their ends in order, and returns a result."""
TimeLimit = Callable[[str], AbstractContextManager[None]]
"""Returns a context that raises CallTimeout in a block that takes too long; the text says what runs in it."""


def call(function: Callable[[], Any], what: str, limit: TimeLimit) -> Work[Settled]:
    """Call a function, await what it returns if that is awaitable, and return the end.

    SystemExit and KeyboardInterrupt pass through: they are meant for the process.
    """
    settled = begin_call(function, what, limit)
    if inspect.isawaitable(settled.value):
        (settled,) = yield [settled.value]
    return settled


def drive(work: Work[Result], run: Callable[[list[Awaitable[Any]]], list[Settled]]) -> Result:
    """Do work to its end, with `run` for what it awaits."""
    try:
        awaitables = next(work)
        while True:
            awaitables = work.send(run(awaitables))
    except StopIteration as end:
        result: Result = end.value
        return result


def begin_call(function: Callable[[], Any], what: str, limit: TimeLimit) -> Settled:
    """Call a function; the value of an async one is an awaitable, which has not begun."""
    begun = time.perf_counter()
    try:
        with limit(what):
            value = function()
    except CallTimeout:
        return Settled(is_late=True, seconds=time.perf_counter() - begun)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a user's function raises is reported
        return Settled(error=error, seconds=time.perf_counter() - begun)
    return Settled(value, seconds=time.perf_counter() - begun)


async def settle(awaitables: Sequence[Awaitable[Any]], seconds: float, ends: list[Settled]) -> None:
    """Run awaitables together, each for at most so many seconds.

    Args:
        ends: receives their ends, in order; until then all count as late, in case this is interrupted.
    """
    begun = time.perf_counter()
    ends[:] = [Settled(is_late=True, seconds=seconds)] * len(awaitables)
    is_over = False

    async def run(place: int, awaitable: Awaitable[Any]) -> None:
        try:
            settled = Settled(await awaitable)
        except CallTimeout:
            settled = Settled(is_late=True)
        except BaseException as error:  # noqa: BLE001 - the loop would let SystemExit out, or lose it
            settled = Settled(error=error)
        if not is_over:
            ends[place] = replace(settled, seconds=time.perf_counter() - begun)

    tasks = [asyncio.ensure_future(run(place, awaitable)) for place, awaitable in enumerate(awaitables)]
    _, late = await asyncio.wait(tasks, timeout=seconds)
    is_over = True
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late, timeout=CANCEL_SECONDS)
