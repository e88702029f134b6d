"""Requests to a scoring service, and the reward http, which asks the user's own for a list of scores.

Several are under way at a time, paced, retried after failures, with a secret key.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import aiohttp

from grpox.contracts import FailedScore, Text, foreign_score
from grpox.errors import ConfigError
from grpox.toolkit import MASK, TEXT, shorten, text_of
from grpox_rewards.configs import HttpConfig, ServiceConfig

TRANSIENT = (408, 425, 429)
"""Statuses below 500 after which a retry may succeed."""
LONGEST_WAIT = 60.0
LARGEST_ANSWER = 64 << 20
"""Largest answer in bytes."""
Result = TypeVar("Result")


class ServiceFailed(Exception):
    """The service gave no usable answer to a request.

    Args:
        is_transient: True: a retry may succeed.
        retry_after: seconds after which the service permits the next request.
    """

    def __init__(self, what: str, is_transient: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(what)
        self.is_transient, self.retry_after = is_transient, retry_after


class Service:
    """A service at an address, with its key from the environment.

    Raises:
        ConfigError: the key is missing in the environment.
    """

    def __init__(self, config: ServiceConfig, url: str) -> None:
        self._config, self._url, self._next_start = config, url, 0.0
        name = config.key_env
        self._key = "" if name is None else os.environ.get(name, "").strip()
        if name is not None and not self._key:
            what = "the environment has no key for the service"
            raise ConfigError(what, given=f"key_env: {name}", allowed=f"export {name}=...")

    async def ask(
        self, bodies: Sequence[bytes], read: Callable[[int, Any], Result]
    ) -> tuple[list[Result | FailedScore], list[int]]:
        """Post each of `bodies`; return the results, and the number of attempts of each.

        Args:
            read: makes a result of a body's position and the JSON of its answer; may raise ServiceFailed.

        Returns:
            Where no attempt succeeded, a `FailedScore` whose text does not contain the key.
        """
        config, attempts = self._config, [0] * len(bodies)
        headers = {"Content-Type": "application/json"}
        if self._key:
            bearer = "Bearer " if config.key_header.lower() == "authorization" else ""
            headers[config.key_header] = bearer + self._key
        timeout = aiohttp.ClientTimeout(total=config.request_timeout)
        room = asyncio.Semaphore(config.concurrency)
        connector = aiohttp.TCPConnector(limit=0)  # `room` sets the limit

        async def post(place: int) -> Result | FailedScore:
            draw = random.Random(f"{config.seed} {bodies[place]!r}")
            async with room:
                while True:
                    attempts[place] += 1
                    try:
                        answer = await self._post(http, bodies[place])
                        break
                    except ServiceFailed as error:
                        if not error.is_transient or attempts[place] > config.retries:
                            times = f" ({attempts[place]} attempts)" if attempts[place] > 1 else ""
                            what = f"{self._url} {error}{times}"
                            # A service may repeat the key in its answer.
                            return FailedScore(what.replace(self._key, MASK) if self._key else what)
                        await asyncio.sleep(self._wait(attempts[place], error.retry_after, draw))
            try:
                return read(place, answer)
            except ServiceFailed as error:
                return FailedScore(str(error))

        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
            return await asyncio.gather(*map(post, range(len(bodies)))), attempts

    async def _post(self, http: aiohttp.ClientSession, body: bytes) -> Any:
        await asyncio.sleep(self._seconds_to_start(time.monotonic()))
        data = bytearray()
        try:
            async with http.post(self._url, data=body, allow_redirects=False) as response:
                async for part in response.content.iter_chunked(1 << 16):
                    data += part
                    if len(data) > LARGEST_ANSWER:
                        raise ServiceFailed(f"answered more than {LARGEST_ANSWER >> 20} MiB")
        except TimeoutError as error:
            raise ServiceFailed(f"did not answer within {self._config.request_timeout:g} s", True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceFailed(f"cannot be asked: {text_of(error) or type(error).__name__}", True) from error
        if response.status != 200:
            text = shorten(" ".join(data.decode(errors="replace").split()), TEXT)
            after = response.headers.get("Retry-After", "")
            raise ServiceFailed(
                f"answered {response.status} {text}".rstrip(),
                response.status in TRANSIENT or response.status >= 500,
                float(after) if after.isdecimal() else 0.0,  # a date is ignored
            )
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ServiceFailed("answered something else than JSON") from error

    def _seconds_to_start(self, now: float) -> float:
        """Reserve the next start of a request; return the seconds until then."""
        rate = self._config.requests_per_second
        start = max(now, self._next_start)
        self._next_start = start + (1 / rate if rate else 0.0)
        return start - now

    def _wait(self, attempts: int, retry_after: float, draw: random.Random) -> float:
        """Return the seconds before the next attempt."""
        doubled = min(self._config.back_off * 2.0 ** (attempts - 1), LONGEST_WAIT)
        return min(LONGEST_WAIT, max(retry_after, doubled * draw.uniform(0.5, 1.0)))


class Http:
    """Posts ``{"prompts": [...], "completions": [...], "columns": {...}}``, expects ``{"scores": [...]}``.

    Prompts and completions are strings or lists of messages, as in the data. A score is a number, or null to
    abstain. A bare list is accepted, too.

    Raises:
        ConfigError: the key is missing in the environment.
    """

    def __init__(self, config: HttpConfig) -> None:
        self.config = config
        self.reads_columns = config.reads_columns
        self._service = Service(config, config.url)

    async def __call__(
        self,
        *,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; `FailedScore` for those of a failed request."""
        sent = {"prompts": prompts, "completions": completions}
        starts = range(0, len(completions), self.config.batch_size)
        batches = [slice(start, start + self.config.batch_size) for start in starts]
        bodies = [
            {name: values[batch] for name, values in sent.items()}
            | {"columns": {name: columns[name][batch] for name in self.config.columns}}
            for batch in batches
        ]
        sizes = [len(body["completions"]) for body in bodies]
        texts = [json.dumps(body, default=str).encode() for body in bodies]
        parts, attempts = await self._service.ask(
            texts, lambda place, answer: read_scores(answer, sizes[place])
        )
        scores: list[float | None] = []
        for part, size in zip(parts, sizes, strict=True):
            scores += part if isinstance(part, list) else [part] * size
        if log_metric is not None:
            log_metric("http/failures", sum(isinstance(s, FailedScore) for s in scores) / len(scores))
            log_metric("http/attempts", sum(attempts) / len(attempts))
        return scores


def read_scores(answer: Any, count: int) -> list[float | None]:
    """Return the scores of an answer.

    Raises:
        ServiceFailed: the answer is not `count` finite numbers or nulls.
    """
    scores = answer.get("scores") if isinstance(answer, dict) else answer
    if not isinstance(scores, list) or len(scores) != count:
        what = f"{len(scores)} scores" if isinstance(scores, list) else "no list of scores"
        raise ServiceFailed(f"the service answered {what} for {count} completions")
    numbers = [None if score is None else foreign_score(score, "the service answered") for score in scores]
    for number in numbers:
        if isinstance(number, FailedScore):
            raise ServiceFailed(number.reason)
    return numbers
