"""Client of one vLLM server: its description, completions as they end, and routes for weights."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp

from grpox.errors import ConfigError
from grpox.toolkit import TEXT, shorten, text_of
from grpox_generators.configs import VllmServerConfig
from grpox_vllm_serving.protocol import ABOUT_PATH

GENERATE = "/inference/v1/generate"
SHORT = 16
"""Number of tokens up to which all completions of a group arrive in one answer: streaming them costs more time
than it saves."""
SECONDS_BETWEEN_LOOKS = 5.0
"""Seconds after which a server with open requests is asked again if it answers."""
LONGEST_LOOK = 60.0
"""Seconds within which a working server describes itself, also between the steps of a large model."""
REFUSED = (400, 422)
"""Statuses of requests for which a retry cannot help."""
IDLE = 2.0
"""Seconds for which an unused connection is kept open. vLLM closes its end after 5: a request sent at that
moment would look like one to a lost server."""
LONGEST_LINE = 2**28
"""Largest size of an event in bytes: a whole completion with its log-probabilities."""


class ServerLost(Exception):
    """The server does not answer, fails, or has other weights than it should."""


class ServerUnfit(ServerLost):
    """The server is silent for too long, or has other weights: a retry cannot help."""


@dataclass
class Completion:
    """One completion, assembled from the pieces that arrive."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    versions: tuple[str, ...] = ()
    """Weight versions that sampled the completion, as the server names them; several if they changed during
    sampling."""


class ServerClient:
    """HTTP client of one server, in the event loop in which this object is created."""

    def __init__(self, url: str, token: str, config: VllmServerConfig) -> None:
        self.url = url
        self.heard = time.monotonic()
        """Time of the server's last answer."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout, sock_read=config.read_timeout
        )
        # With one host, a large run has more open requests than aiohttp's default of 100.
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE),
            read_bufsize=LONGEST_LINE,
        )

    async def about(self) -> dict[str, Any]:
        """Return the server's description of itself, see `grpox_vllm_serving.protocol`."""
        try:
            async with asyncio.timeout(LONGEST_LOOK):
                return await self._json("GET", ABOUT_PATH)
        except TimeoutError as error:
            raise ServerLost(f"{self.url} was silent for {LONGEST_LOOK:g} s") from error

    async def watch(self, version: str) -> NoReturn:
        """Ask every few seconds if the server still describes itself; never returns.

        Raises:
            ServerLost: it does not, twice in a row, or has other weights than `version`. A request to it then
                stays without an answer, though its connection may be open.
        """
        is_silent = False
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            try:
                current = (await self.about())["weight_version"]
            except ServerLost:
                if is_silent:
                    raise
                is_silent = True
                continue
            is_silent = False
            if current != version:
                raise ServerUnfit(f"{self.url} has weights {current} instead of {version}")

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of one of vLLM's routes."""
        return await self._json("POST", path, body)

    async def complete(self, token_ids: list[int], params: Mapping[str, Any]) -> AsyncIterator[Completion]:
        """Yield the completions of one prompt, each when it has ended.

        Args:
            params: arguments of vLLM's SamplingParams, as JSON.
        """
        stream = params["max_tokens"] > SHORT
        # One piece at the first token and one at the end are enough: nobody reads the text as it grows.
        params = {**params, "stream_interval": 2**30}
        body = {"token_ids": token_ids, "sampling_params": params, "stream": stream}
        open_ones: dict[int, Completion] = {}
        async with self._answer("POST", GENERATE, body) as response:
            async for event in self._events(response, stream):
                for choice in event["choices"]:
                    completion = open_ones.setdefault(choice["index"], Completion(choice["index"]))
                    if _add(completion, choice):
                        yield open_ones.pop(completion.index)
        if open_ones:
            raise ServerLost(f"{self.url} ended {len(open_ones)} completions in the middle")

    async def close(self) -> None:
        await self._session.close()

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        async with self._answer(method, path, body) as response:
            content: dict[str, Any] = await response.json()
        return content

    async def _events(self, response: aiohttp.ClientResponse, stream: bool) -> AsyncIterator[dict[str, Any]]:
        if not stream:
            yield await response.json()
            return
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if error := event.get("error"):  # after the stream has begun, the status cannot change any more
                    if error.get("code") in REFUSED:
                        raise _refused(str(error["message"]))
                    raise ServerLost(f"{self.url} failed: {shorten(str(error), TEXT)}")
                yield event

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with a status of success; raise the matching error for any other status."""
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                await self._check(path, response)
                self.heard = time.monotonic()
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as error:
            raise _lost(self.url, error) from error

    async def _check(self, path: str, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        text = " ".join((await response.text()).split())[:500]
        if response.status == 401:
            allowed = "the token that it was started with"
            what = f"the server {self.url} refuses the token"
            raise ConfigError(what, "generator.token_file", allowed=allowed)
        if response.status == 404 and path == ABOUT_PATH:
            raise ConfigError(f"{self.url} is not a server started by `grpox serve`", "generator.urls")
        if response.status in REFUSED and path == GENERATE:
            raise _refused(_message(text))
        raise ServerLost(f"{self.url} answers {response.status} to {path}: {text}")


def _add(completion: Completion, choice: Mapping[str, Any]) -> bool:
    """Add the tokens of `choice`; return True if the completion has ended."""
    completion.token_ids += choice["token_ids"]
    if choice["logprobs"] is not None:
        completion.logprobs += [position["logprob"] for position in choice["logprobs"]["content"]]
    if choice["finish_reason"] is None:
        return False
    completion.finish_reason = choice["finish_reason"]
    completion.versions = tuple(span["version"] for span in choice["weight_versions"] or ())
    return True


def _refused(message: str) -> ConfigError:
    return ConfigError(f"vLLM does not accept these settings: {message}", "sampling")


def _lost(url: str, error: BaseException) -> ServerLost:
    kind = ServerUnfit if isinstance(error, TimeoutError) else ServerLost
    return kind(f"{url}: {' '.join(text_of(error).split()) or type(error).__name__}")


def _message(text: str) -> str:
    """Return the message in vLLM's JSON of an error, or the whole text."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text
