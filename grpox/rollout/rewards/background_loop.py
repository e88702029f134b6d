"""One asyncio event loop for the life of the process, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class BackgroundCall:
    """A coroutine at work in the background loop, from the moment this is built.

    The loop outlives the call, because clients that users create once (aiohttp, httpx, openai) hold
    connections that belong to the loop of their first use.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._loop = _background_loop()
        self._task: Future[asyncio.Task[Any]] = Future()
        # In a copy of this thread's context.
        self._loop.call_soon_threadsafe(lambda: self._task.set_result(self._loop.create_task(work)))
        self._ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> asyncio.Task[Any]:
        await asyncio.wait([self._task.result()])
        return self._task.result()

    def result(self) -> Any:
        """Waits for the end and returns the result; also where the caller's own loop is running.

        Raises:
            asyncio.CancelledError: `cancel` stopped it.
        """
        return self._ended.result().result()

    def cancel(self) -> None:
        """Asks the coroutine to stop; `result` returns when it has."""
        self._loop.call_soon_threadsafe(lambda: self._task.result().cancel())


@functools.cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_serve, args=(loop,), name="grpox-async-rewards", daemon=True).start()
    return loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # asyncio lets these two out of run_forever, and tells them to whoever awaits the task as well.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
