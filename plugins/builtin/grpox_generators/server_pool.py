"""Spreads requests over servers by how much each has to do, and hands completions on as they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from grpox.contracts import Prompt
from grpox.errors import RunFailed
from grpox_generators.server_client import Completion, ServerClient, ServerLost, ServerUnfit

FIRST_BACK_OFF = 0.5
LONGEST_BACK_OFF = 10.0


@dataclass(eq=False)
class Request:
    """One prompt's group."""

    prompt: Prompt
    params: dict[str, Any]
    """Of vLLM's SamplingParams."""
    delivered: set[int] = field(default_factory=set)
    """Samples that are in: asked for again, they are drawn again alike and not handed on twice."""

    @property
    def missing(self) -> int:
        return self.prompt.num_samples - len(self.delivered)


@dataclass(eq=False)
class Member:
    """A server that has the weights of now."""

    client: ServerClient
    room: int
    """Completions to have there at a time: enough that it never waits for a request."""
    outstanding: int = 0


class ServerPool:
    """The servers of one call of `generate`."""

    def __init__(self, members: Sequence[Member], version: str, retries: int) -> None:
        self._members = list(members)
        self._version = version
        self._retries = retries
        self.lost: dict[str, str] = {}
        """Why each server that is no longer asked was given up, by address."""

    async def run(self, requests: Sequence[Request], deliver: Callable[[Request, Completion], None]) -> None:
        """Complete `requests`; what is still missing when it returns no server was left to complete.

        Args:
            deliver: called once for each sample, in order of completion.

        Raises:
            ConfigError: a server does not take a request.
        """
        waiting = deque(requests)
        running: dict[asyncio.Task[None], tuple[Member, Request]] = {}
        try:
            while waiting or running:
                while waiting and (member := self._least_busy()) is not None:
                    request = waiting.popleft()
                    member.outstanding += request.prompt.num_samples
                    running[asyncio.create_task(self._complete(member, request, deliver))] = member, request
                if not running:
                    return
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    member, request = running.pop(task)
                    member.outstanding -= request.prompt.num_samples
                    if self._failed(task, member):
                        waiting.append(request)
        finally:
            for task in running:
                task.cancel()
            # Also those that failed meanwhile: asyncio complains of an error that nobody looks at.
            await asyncio.gather(*running, return_exceptions=True)

    def _least_busy(self) -> Member | None:
        free = [member for member in self._members if member.outstanding < member.room]
        return min(free, key=lambda member: member.outstanding / member.room, default=None)

    def _failed(self, task: asyncio.Task[None], member: Member) -> bool:
        """Whether its server was lost, which is then asked no more; other errors are raised."""
        try:
            task.result()
        except ServerLost as error:
            if member in self._members:
                self._members.remove(member)
                self.lost[member.client.url] = str(error)
            return True
        return False

    async def _complete(
        self, member: Member, request: Request, deliver: Callable[[Request, Completion], None]
    ) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(self._retries + 1),
            wait=wait_exponential(multiplier=FIRST_BACK_OFF, max=LONGEST_BACK_OFF),
            reraise=True,
        )
        await retrying(self._attempt, member, request, deliver)

    async def _attempt(
        self, member: Member, request: Request, deliver: Callable[[Request, Completion], None]
    ) -> None:
        url = member.client.url
        async for completion in member.client.complete(list(request.prompt.token_ids), request.params):
            if completion.finish_reason in ("abort", "error"):
                raise ServerLost(f"{url} broke off a completion: {completion.finish_reason}")
            if set(completion.versions) != {self._version}:
                held = ", ".join(completion.versions) or "unknown"
                raise ServerUnfit(f"{url} sampled with weights {held} in place of {self._version}")
            if len(completion.logprobs) != len(completion.token_ids):
                raise RunFailed(
                    f"{url} sent {len(completion.token_ids)} tokens without their log-probabilities"
                )
            if completion.index not in request.delivered:
                request.delivered.add(completion.index)
                deliver(request, completion)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, ServerLost) and not isinstance(error, ServerUnfit)
