"""Spreads requests over servers by their load, and returns completions as they end."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from grpox.contracts import Prompt
from grpox.errors import RunFailed
from grpox_generators.server_client import Completion, ServerClient, ServerLost, ServerUnfit
from grpox_generators.server_fleet import Fleet, end_if_signalled

FIRST_BACK_OFF = 0.5
LONGEST_BACK_OFF = 10.0


@dataclass(eq=False)
class Request:
    """One prompt's group."""

    prompt: Prompt
    params: dict[str, Any]
    """Arguments of vLLM's SamplingParams."""
    delivered: set[int] = field(default_factory=set)
    """Samples that have arrived. A repeated request draws the same samples again, and none is delivered
    twice."""

    @property
    def missing(self) -> int:
        return self.prompt.num_samples - len(self.delivered)


@dataclass(eq=False)
class Member:
    """A server with the current weights."""

    client: ServerClient
    room: int
    """Number of completions in progress there: large enough that the server never waits for a request."""
    outstanding: int = 0


class ServerPool:
    """The servers of one call of `generate`."""

    def __init__(self, members: Sequence[Member], version: str, retries: int) -> None:
        self._members = list(members)
        self._version = version
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda e: isinstance(e, ServerLost) and not isinstance(e, ServerUnfit)),
            stop=stop_after_attempt(retries + 1),
            wait=wait_exponential(multiplier=FIRST_BACK_OFF, max=LONGEST_BACK_OFF),
            reraise=True,
        )
        self._complete = retrying.wraps(self._attempt)
        self.lost: dict[str, str] = {}
        """Address -> reason for which the server gets no more requests."""

    @property
    def heard(self) -> float:
        """Time of the last answer of any server, by time.monotonic."""
        return max((member.client.heard for member in self._members), default=0.0)

    async def run(self, requests: Sequence[Request], deliver: Callable[[Request, Completion], None]) -> None:
        """Complete `requests`. Requests that are incomplete on return found no server.

        Args:
            deliver: called once for each sample, in order of completion.

        Raises:
            ConfigError: a server refuses a request.
        """
        waiting = deque(requests)
        running: dict[asyncio.Task[None], tuple[Member, Request]] = {}
        watches = {asyncio.create_task(each.client.watch(self._version)): each for each in self._members}
        try:
            while waiting or running:
                while waiting and (member := self._least_busy()) is not None:
                    request = waiting.popleft()
                    member.outstanding += request.prompt.num_samples
                    work = asyncio.create_task(self._complete(member, request, deliver))
                    running[work] = member, request
                if not running:
                    return
                ended, _ = await asyncio.wait([*running, *watches], return_when=asyncio.FIRST_COMPLETED)
                for watch in [each for each in watches if each in ended]:
                    silent = watches.pop(watch)
                    self._drop(silent, str(watch.exception()))
                    for task, (member, _) in running.items():
                        if member is silent:
                            task.cancel()
                for task in [each for each in running if each in ended]:
                    member, request = running.pop(task)
                    member.outstanding -= request.prompt.num_samples
                    try:
                        task.result()
                    except asyncio.CancelledError:  # its server is silent
                        waiting.append(request)
                    except ServerLost as error:
                        waiting.append(request)
                        self._drop(member, str(error))
        finally:
            for task in (*running, *watches):
                task.cancel()
            # Include tasks that failed meanwhile: asyncio reports errors that nobody retrieves.
            await asyncio.gather(*running, *watches, return_exceptions=True)

    def _drop(self, member: Member, why: str) -> None:
        """Send no more requests to a server."""
        if member in self._members:
            self._members.remove(member)
            self.lost[member.client.url] = why

    def _least_busy(self) -> Member | None:
        free = [member for member in self._members if member.outstanding < member.room]
        return min(free, key=lambda member: member.outstanding / member.room, default=None)

    async def _attempt(
        self, member: Member, request: Request, deliver: Callable[[Request, Completion], None]
    ) -> None:
        url = member.client.url
        async for completion in member.client.complete(list(request.prompt.token_ids), request.params):
            if completion.finish_reason in ("abort", "error"):
                raise ServerLost(f"{url} broke off a completion: {completion.finish_reason}")
            if set(completion.versions) != {self._version}:
                weights = ", ".join(completion.versions) or "unknown"
                raise ServerUnfit(f"{url} sampled with weights {weights} instead of {self._version}")
            if len(completion.logprobs) != len(completion.token_ids):
                raise RunFailed(
                    f"{url} sent {len(completion.token_ids)} tokens without their log-probabilities"
                )
            if completion.index not in request.delivered:
                request.delivered.add(completion.index)
                deliver(request, completion)


class PendingRequests:
    """Requests to a pool, in progress in the fleet's thread from the start; for use by one thread.

    Args:
        version: version of the policy whose weights sample.
    """

    def __init__(self, fleet: Fleet, pool: ServerPool, requests: Sequence[Request], version: int) -> None:
        self.version = version
        self._fleet = fleet
        self._pool = pool
        self._inbox = queue.SimpleQueue[tuple[Request, Completion] | None]()
        self._work = fleet.loop.start(pool.run(requests, lambda *item: self._inbox.put(item)))
        self._work.add_done_callback(lambda _: self._inbox.put(None))

    def arriving(self) -> Iterator[tuple[Request, Completion]]:
        """Yield completions as they end, until all have arrived or no server is left; read it once.

        Raises:
            ConfigError: a server refuses a request.
            RunFailed: a server sends an unusable answer.
        """
        try:
            while True:
                try:
                    item = self._inbox.get(timeout=1.0)
                except queue.Empty:
                    end_if_signalled(self._pool.heard)
                    continue
                if item is None:
                    break
                yield item
            self._work.result()
        finally:
            self.cancel()
        self._give_up_lost()

    def wait(self) -> None:
        """Wait until no request is in progress; answers and errors can still be read."""
        while wait([self._work], timeout=1.0).not_done:
            end_if_signalled(self._pool.heard)
        self._give_up_lost()

    def cancel(self) -> None:
        """Cancel the requests that are still in progress."""
        self._work.cancel()

    def _give_up_lost(self) -> None:
        """Give each lost server up once: it may come back before all answers are read."""
        while self._pool.lost:
            self._fleet.give_up(*self._pool.lost.popitem())
