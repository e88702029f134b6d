"""The servers of a run as one process sees them: which answer, their descriptions, and requests to all of
them."""

from __future__ import annotations

import asyncio
import shlex
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from grpox.errors import ConfigError, Problem, RunFailed
from grpox.runtime.logs import get_logger
from grpox.toolkit import raise_if_signalled
from grpox_generators.configs import VllmServerConfig
from grpox_generators.server_client import ServerClient, ServerLost
from grpox_vllm_serving.launch import FILE_BACKEND
from grpox_vllm_serving.protocol import INSTANCE_FILE, PROTOCOL, differences, read_token

Result = TypeVar("Result")

logger = get_logger(__name__)
SECONDS_BETWEEN_LOOKS = 1.0
SILENCE = 15.0
"""Seconds without an answer after which a signal ends the wait for it."""
DEFAULT_PORT = 8000
"""Port on which `grpox serve` listens by default."""


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
        self,
        config: VllmServerConfig,
        model: Mapping[str, Any],
        sends_weights: bool = True,
        path: str = "",
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
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return True

    def look(self) -> dict[str, dict[str, Any]]:
        """Ask every server once for its description, and use those that answer and were not given up."""
        before, used = set(self.lost), set(self.abouts)
        answers = self.loop.run(_all({url: client.about() for url, client in self.clients.items()}))
        lost = {url: str(answer) for url, answer in answers.items() if isinstance(answer, ServerLost)}
        self.abouts = {url: answers[url] for url in answers if url not in {*lost, *self._given_up}}
        self.lost = self._given_up | lost
        for url, about in self.abouts.items():
            _check(url, about, self._model)
            if self._sends_weights and about["transfer"] == FILE_BACKEND:
                _check_folder(url, about)
            self._check_owner(url, about)
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

    def _check_owner(self, url: str, about: Mapping[str, Any]) -> None:
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


def _check(url: str, about: Mapping[str, Any], signature: Mapping[str, Any]) -> None:
    """Refuse a server that cannot sample for this run."""
    if about["protocol"] != PROTOCOL:
        what = f"the server {url} runs grpox {about['grpox']}, which uses a different protocol"
        given, allowed = str(about["protocol"]), str(PROTOCOL)
        raise ConfigError(what, "generator.urls", given=given, allowed=allowed)
    if lines := differences(signature, about["signature"]):
        what = f"the server {url} has a different model than this run, {about['model']}: {', '.join(lines)}"
        raise ConfigError(what, "generator.urls", allowed="grpox serve with the run's model.path")


def _check_folder(url: str, about: Mapping[str, Any]) -> None:
    """Refuse a server if this machine cannot write to the server's folder for weights."""
    folder = Path(about["weights_folder"])
    try:
        if (folder / INSTANCE_FILE).read_text(encoding="ascii") == about["instance"]:
            return
    except OSError:
        pass
    what = f"weights for {url} go through its folder {folder}, which does not exist here"
    allowed = "grpox serve --weights-dir with a folder that both machines share, or --weights nccl with CUDA"
    raise ConfigError(what, "generator.urls", allowed=allowed)
