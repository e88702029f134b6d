"""One asyncio event loop for the life of the process, in a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


def run_in_background_loop(work: Coroutine[None, None, Result]) -> Result:
    """Runs `work` to its end and returns its result; also where the caller's own loop is running.

    The loop outlives the call, because clients that users create once (aiohttp, httpx, openai) hold
    connections that belong to the loop of their first use.
    """
    future = asyncio.run_coroutine_threadsafe(work, _background_loop())
    try:
        return future.result()
    finally:
        future.cancel()  # no effect once done; stops the work when the caller is interrupted


@functools.cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpox-async-rewards", daemon=True).start()
    return loop
