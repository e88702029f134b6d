"""Requests that servers are at work on, and their completions as they end."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import wait

from grpox_generators.server_client import Completion
from grpox_generators.server_fleet import Fleet
from grpox_generators.server_pool import Request, ServerPool


class Asked:
    """The work of a pool, under way in the fleet's thread from the start. To be used by one thread.

    Args:
        version: the policy's, of the weights that sample.
    """

    def __init__(self, fleet: Fleet, pool: ServerPool, requests: Sequence[Request], version: int) -> None:
        self.version = version
        self._fleet = fleet
        self._pool = pool
        self._inbox = queue.SimpleQueue[tuple[Request, Completion] | None]()
        self._work = fleet.loop.start(pool.run(requests, lambda *item: self._inbox.put(item)))
        self._work.add_done_callback(lambda _: self._inbox.put(None))

    def arriving(self) -> Iterator[tuple[Request, Completion]]:
        """In order of completion, until all are in or no server is left; to be read once.

        Raises:
            ConfigError: a server does not take a request.
            RunFailed: a server answers with what cannot be used.
        """
        try:
            while (item := self._inbox.get()) is not None:
                yield item
            self._work.result()
        finally:
            self.cancel()
        self._give_up_lost()

    def wait(self) -> None:
        """Until no server is asked any more; what came, or went wrong, is still there to be read."""
        wait([self._work])
        self._give_up_lost()

    def cancel(self) -> None:
        """Ask no more, if there is still something to ask."""
        self._work.cancel()

    def _give_up_lost(self) -> None:
        """Once: a server may come back before all that was asked is read."""
        while self._pool.lost:
            self._fleet.give_up(*self._pool.lost.popitem())
