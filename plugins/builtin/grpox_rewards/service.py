"""Requests to a scoring service: several at a time, paced, retried after failures, with a secret key."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from grpox.errors import ConfigError
from grpox.toolkit import MASK, TEXT, shorten, text_of
from grpox_rewards.configs import ServiceConfig

TRANSIENT = (408, 425, 429)
"""Statuses below 500 after which a retry may succeed."""
LONGEST_WAIT = 60.0
LARGEST_ANSWER = 64 << 20
"""Largest answer in bytes."""


class ServiceFailed(Exception):
    """The service gave no usable answer to a request."""

    is_transient = False
    retry_after = 0.0
    """Seconds after which the service permits the next request."""


@dataclass
class Pace:
    """Start times of requests, `gap` seconds apart."""

    gap: float
    next_start: float = 0.0

    def reserve(self, now: float) -> float:
        """Reserve the next start; return the seconds until then."""
        start = max(now, self.next_start)
        self.next_start = start + self.gap
        return start - now


@dataclass
class Session:
    """Requests of one call of a reward: one HTTP session, with a limit on simultaneous requests."""

    http: aiohttp.ClientSession
    room: asyncio.Semaphore
    attempts: list[int] = field(default_factory=list)
    """Number of attempts of each request."""


class Service:
    """A service at an address, with its key from the environment.

    Raises:
        ConfigError: the key is missing in the environment.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._key = _key_of(config)
        self._pace = Pace(1 / config.requests_per_second if config.requests_per_second else 0.0)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Open a session in the caller's event loop."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            bearer = "Bearer " if self._config.key_header.lower() == "authorization" else ""
            headers[self._config.key_header] = bearer + self._key
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout)
        room = asyncio.Semaphore(self._config.concurrency)
        connector = aiohttp.TCPConnector(limit=0)  # `room` sets the limit
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
            yield Session(http, room)

    async def post(self, session: Session, url: str, body: bytes) -> Any:
        """Return the JSON that answers `body`.

        Raises:
            ServiceFailed: the last attempt failed too; its text does not contain the key.
        """
        draw = random.Random(f"{self._config.seed} {body!r}")
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, ServiceFailed) and error.is_transient),
            stop=stop_after_attempt(self._config.retries + 1),
            wait=lambda state: self._wait(state, draw),
            reraise=True,
        )
        place = len(session.attempts)
        session.attempts.append(0)
        async with session.room:
            try:
                async for attempt in retrying:
                    with attempt:
                        session.attempts[place] += 1
                        return await self._post_once(session.http, url, body)
            except ServiceFailed as error:
                times = f" ({session.attempts[place]} attempts)" if session.attempts[place] > 1 else ""
                raise ServiceFailed(self._masked(f"{url} {error}{times}")) from None
        raise AssertionError("a retry either returns or raises")

    async def _post_once(self, http: aiohttp.ClientSession, url: str, body: bytes) -> Any:
        await asyncio.sleep(self._pace.reserve(time.monotonic()))
        try:
            async with http.post(url, data=body, allow_redirects=False) as response:
                data = await _read(response)
        except TimeoutError as error:
            raise _transient(f"did not answer within {self._config.request_timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _transient(f"cannot be asked: {text_of(error) or type(error).__name__}") from error
        if response.status != 200:
            text = shorten(" ".join(data.decode(errors="replace").split()), TEXT)
            failure = f"answered {response.status} {text}".rstrip()
            if response.status not in TRANSIENT and response.status < 500:
                raise ServiceFailed(failure)
            raise _transient(failure, response.headers.get("Retry-After", ""))
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ServiceFailed("answered something else than JSON") from error

    def _wait(self, state: RetryCallState, draw: random.Random) -> float:
        """Return the seconds before the next attempt."""
        doubled = self._config.back_off * 2.0 ** (state.attempt_number - 1)
        error = state.outcome.exception() if state.outcome is not None else None
        least = error.retry_after if isinstance(error, ServiceFailed) else 0.0
        return min(LONGEST_WAIT, max(least, min(doubled, LONGEST_WAIT) * draw.uniform(0.5, 1.0)))

    def _masked(self, text: str) -> str:
        """Mask the key, which a service may repeat in its answer."""
        return text.replace(self._key, MASK) if self._key else text


def _key_of(config: ServiceConfig) -> str:
    if config.key_env is None:
        return ""
    key = os.environ.get(config.key_env, "").strip()
    if not key:
        what = "the environment has no key for the service"
        raise ConfigError(what, given=f"key_env: {config.key_env}", allowed=f"export {config.key_env}=...")
    return key


def _transient(failure: str, retry_after: str = "") -> ServiceFailed:
    error = ServiceFailed(failure)
    error.is_transient = True
    error.retry_after = float(retry_after) if retry_after.isdecimal() else 0.0  # a date is ignored
    return error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for part in response.content.iter_chunked(1 << 16):
        data += part
        if len(data) > LARGEST_ANSWER:
            raise ServiceFailed(f"answered more than {LARGEST_ANSWER >> 20} MiB")
    return bytes(data)
