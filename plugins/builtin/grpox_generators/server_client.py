"""The vLLM servers of a run as one process sees them: clients, descriptions, and requests to all of them."""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import aiohttp

from grpox.errors import ConfigError, Problem, RunFailed
from grpox.runtime.logs import get_logger
from grpox.toolkit import TEXT, raise_if_signalled, shorten, text_of
from grpox_generators.configs import VllmServerConfig
from grpox_generators.vllm_requests import refused_settings
from grpox_vllm_serving.launch import FILE_BACKEND
from grpox_vllm_serving.protocol import ABOUT_PATH, INSTANCE_FILE, PROTOCOL, differences, read_token

Result = TypeVar("Result")

logger = get_logger(__name__)
GENERATE = "/inference/v1/generate"
SHORT = 16
"""Number of tokens up to which all completions of a group arrive in one answer: streaming them costs more time
than it saves."""
SECONDS_BETWEEN_LOOKS = 5.0
"""Seconds after which a server with open requests is asked again if it answers."""
LONGEST_LOOK = 60.0
"""Seconds within which a working server describes itself, also between the steps of a large model."""
SECONDS_BETWEEN_SEARCHES = 1.0
"""Seconds after which servers that do not answer yet are asked again."""
SILENCE = 15.0
"""Seconds without an answer after which a signal ends the wait for it."""
REFUSED = (400, 422)
"""Statuses of requests for which a retry cannot help."""
IDLE = 2.0
"""Seconds for which an unused connection is kept open. vLLM closes its end after 5: a request sent at that
moment would look like one to a lost server."""
LONGEST_LINE = 2**28
"""Largest size of an event in bytes: a whole completion with its log-probabilities."""
DEFAULT_PORT = 8000
"""Port on which `grpox serve` listens by default."""


class ServerLost(Exception):
    """The server does not answer, fails, or has other weights than it should."""


class ServerUnfit(ServerLost):
    """The server is silent for too long, or has other weights: a retry cannot help."""


@dataclass
class ServedCompletion:
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
            async with asyncio.timeout(LONGEST_LOOK), self._answer("GET", ABOUT_PATH) as response:
                about: dict[str, Any] = await response.json()
                return about
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
        async with self._answer("POST", path, body) as response:
            content: dict[str, Any] = await response.json()
        return content

    async def complete(
        self, token_ids: list[int], params: Mapping[str, Any]
    ) -> AsyncIterator[ServedCompletion]:
        """Yield the completions of one prompt, each when it has ended.

        Args:
            params: arguments of vLLM's SamplingParams, as JSON.
        """
        stream = params["max_tokens"] > SHORT
        # One piece at the first token and one at the end are enough: nobody reads the text as it grows.
        params = {**params, "stream_interval": 2**30}
        body = {"token_ids": token_ids, "sampling_params": params, "stream": stream}
        open_ones: dict[int, ServedCompletion] = {}
        async with self._answer("POST", GENERATE, body) as response:
            async for event in self._events(response, stream):
                for choice in event["choices"]:
                    completion = open_ones.setdefault(choice["index"], ServedCompletion(choice["index"]))
                    completion.token_ids += choice["token_ids"]
                    if choice["logprobs"] is not None:
                        completion.logprobs += [each["logprob"] for each in choice["logprobs"]["content"]]
                    if choice["finish_reason"] is not None:
                        completion.finish_reason = choice["finish_reason"]
                        completion.versions = tuple(span["version"] for span in choice["weight_versions"] or ())
                        yield open_ones.pop(completion.index)
        if open_ones:
            raise ServerLost(f"{self.url} ended {len(open_ones)} completions in the middle")

    async def close(self) -> None:
        await self._session.close()

    async def _events(self, response: aiohttp.ClientResponse, stream: bool) -> AsyncIterator[dict[str, Any]]:
        if not stream:
            yield await response.json()
            return
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if error := event.get("error"):  # after the stream has begun, the status cannot change any more
                    if error.get("code") in REFUSED:
                        raise refused_settings(str(error["message"]))
                    raise ServerLost(f"{self.url} failed: {shorten(str(error), TEXT)}")
                yield event

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with a status of success; raise the matching error for any other status."""
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                if response.status != 200:
                    raise _failure(self.url, path, response.status, await response.text())
                self.heard = time.monotonic()
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as error:
            kind = ServerUnfit if isinstance(error, TimeoutError) else ServerLost
            reason = " ".join(text_of(error).split()) or type(error).__name__
            raise kind(f"{self.url}: {reason}") from error


def _failure(url: str, path: str, status: int, text: str) -> Exception:
    """Return the error for an answer without success."""
    if status == 401:
        allowed = "the token that it was started with"
        return ConfigError(f"the server {url} refuses the token", "generator.token_file", allowed=allowed)
    if status == 404 and path == ABOUT_PATH:
        return ConfigError(f"{url} is not a server started by `grpox serve`", "generator.urls")
    if status in REFUSED and path == GENERATE:
        try:
            return refused_settings(str(json.loads(text)["error"]["message"]))
        except (ValueError, KeyError, TypeError):  # not vLLM's JSON of an error
            return refused_settings(shorten(text, TEXT))
    return ServerLost(f"{url} answers {status} to {path}: {' '.join(text.split())[:500]}")


def end_if_signalled(silent_since: float = 0.0) -> None:
    """Raise a signal that waits for the end of the step: without an answer of a server the step has no end."""
    if time.monotonic() - silent_since > SILENCE and threading.current_thread() is threading.main_thread():
        raise_if_signalled()


class LoopThread:
    """An event loop in its own thread.

    Async rewards do not share it: a blocking reward would delay the servers' answers.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpox-servers", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin `work` and return at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do `work`; an exception here, such as an interrupt, cancels it."""
        future, begin = self.start(work), time.monotonic()
        try:
            while not future.done():
                wait([future], timeout=1.0)
                end_if_signalled(begin)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop; unfinished work is dropped."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Fleet:
    """HTTP clients of all configured servers; `abouts` has the descriptions of servers in use, by address."""

    def __init__(
        self, config: VllmServerConfig, model: Mapping[str, Any], sends_weights: bool = True, path: str = ""
    ) -> None:
        """Connect to the servers.

        Args:
            model: signature of the run's model, see `grpox_vllm_serving.protocol`.
            path: the model's folder or hub id, for messages.
        """
        self.serve = serve_command(config, path)
        token = read_token(config.token_file, "generator.token_file", self.serve)
        self.config = config
        self.loop = LoopThread()
        self.clients: dict[str, ServerClient] = {}
        self.abouts: dict[str, dict[str, Any]] = {}
        self.lost: dict[str, str] = {}
        """Address -> why the server is not in use."""
        self.last_loss = ""
        """Reason for which the last server was given up."""
        self._given_up: dict[str, str] = {}
        self._sends_weights = sends_weights
        self._model = model
        self._ours: dict[str, str] = {}
        """Start of a server (its instance) -> weights that this run sent it last."""
        self.loop.run(self._open(token))

    def find(self) -> bool:
        """Use every server that answers; return True if one did within `start_timeout`.

        Raises:
            ConfigError: a server has another model or version, or refuses the token.
            RunFailed: another run uses a server.
        """
        deadline = time.monotonic() + self.config.start_timeout
        has_warned = False
        while not self.look():
            if time.monotonic() >= deadline:
                return False
            if not has_warned:
                logger.warning(
                    "vllm-server: waiting for a server: %s\n    start one: %s",
                    "; ".join(self.lost.values()),
                    self.serve,
                )
                has_warned = True
            end_if_signalled()
            time.sleep(SECONDS_BETWEEN_SEARCHES)
        return True

    def look(self) -> dict[str, dict[str, Any]]:
        """Ask every server once for its description, and use those that answer and were not given up."""
        before, used = set(self.lost), set(self.abouts)
        answers = self.loop.run(_all({url: client.about() for url, client in self.clients.items()}))
        lost = {url: str(answer) for url, answer in answers.items() if isinstance(answer, ServerLost)}
        self.abouts = {url: answers[url] for url in answers if url not in {*lost, *self._given_up}}
        self.lost = self._given_up | lost
        for url, about in self.abouts.items():
            self._check(url, about)
        for url in used & set(lost):
            logger.warning("vllm-server: lost a server: %s", lost[url])
        for url in before & set(self.abouts):
            logger.info("vllm-server: %s answers", url)
        return self.abouts

    def readmit(self) -> None:
        """Use servers again that were given up, if they answer: they are about to receive weights."""
        self._given_up.clear()

    def sent(self, version: str) -> None:
        """Record that the servers in use have the weights `version` from this run."""
        self._ours.update({about["instance"]: version for about in self.abouts.values()})

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Send the same request to all servers in use; stop using those that fail."""
        self.loop.run(self.post_each(path, dict.fromkeys(self.abouts, body)))

    async def post_each(self, path: str, bodies: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Send requests as `post` does, within the loop, with a separate body for each address."""
        answers = await _all({url: self.clients[url].post(path, body) for url, body in bodies.items()})
        for url, answer in answers.items():
            if isinstance(answer, ServerLost):
                self.give_up(url, str(answer))
            elif answer.get("success") is False:
                self.give_up(url, f"{url} failed at {path}: {answer}")

    def give_up(self, url: str, why: str) -> None:
        """Stop using a server until `readmit`."""
        if self.abouts.pop(url, None) is not None:
            self.lost[url] = self._given_up[url] = self.last_loss = why
            logger.warning("vllm-server: lost a server: %s", why)

    def close(self) -> None:
        """Close the connections; the servers continue to run."""
        for client in self.clients.values():
            self.loop.run(client.close())
        self.loop.close()

    async def _open(self, token: str) -> None:
        self.clients = {url: ServerClient(url, token, self.config) for url in self.config.urls}

    def _check(self, url: str, about: Mapping[str, Any]) -> None:
        """Refuse a server that cannot sample for this run, or cannot get its weights."""
        if about["protocol"] != PROTOCOL:
            what = f"the server {url} runs grpox {about['grpox']}, which uses a different protocol"
            given, allowed = str(about["protocol"]), str(PROTOCOL)
            raise ConfigError(what, "generator.urls", given=given, allowed=allowed)
        if lines := differences(self._model, about["signature"]):
            different = f"{about['model']}: {', '.join(lines)}"
            what = f"the server {url} has a different model than this run, {different}"
            raise ConfigError(what, "generator.urls", allowed="grpox serve with the run's model.path")
        if self._sends_weights and about["transfer"] == FILE_BACKEND and not _is_shared(about):
            what = (
                f"weights for {url} go through its folder {about['weights_folder']}, which does not exist here"
            )
            allowed = "grpox serve --weights-dir with a folder that both machines share"
            allowed += ", or --weights nccl with CUDA"
            raise ConfigError(what, "generator.urls", allowed=allowed)
        ours, current = self._ours.get(about["instance"]), about["weight_version"]
        if ours is not None and current != ours and current.partition("/")[0] != ours.partition("/")[0]:
            raise RunFailed(
                f"another run has sent weights ({current}) to the vLLM server {url} that this run uses: "
                "a server serves one run at a time"
            )

    def none_answers(self) -> Problem:
        """Return the problem to report when `find` returns False."""
        what = f"no vLLM server answers: {'; '.join(self.lost.values())}"
        start = f"start one with `{self.serve}`, or name the address of a running one"
        return Problem(what, "generator.urls", given=", ".join(self.config.urls), allowed=start)


def serve_command(config: VllmServerConfig, path: str) -> str:
    """Write the command that starts the run's first server; options only where they are not the default."""
    parts = urlsplit(config.urls[0])
    words = ["grpox", "serve", path or "MODEL"]
    if parts.hostname not in ("127.0.0.1", "localhost", None):
        words += ["--host", parts.hostname]
    if (port := parts.port or 80) != DEFAULT_PORT:
        words += ["--port", str(port)]
    if config.token_file is not None:
        words += ["--token-file", str(config.token_file)]
    return shlex.join(words)


async def _all(requests: Mapping[str, Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    """Return the answer of each server, or its ServerLost; raises any other error."""
    answers = await asyncio.gather(*requests.values(), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, ServerLost):
            raise answer
    return dict(zip(requests, answers, strict=True))


def _is_shared(about: Mapping[str, Any]) -> bool:
    """Tell whether the folder of this machine is the server's."""
    file = Path(about["weights_folder"], INSTANCE_FILE)
    try:
        return file.read_text(encoding="ascii") == str(about["instance"])
    except OSError:
        return False
