"""Starts `grpox serve` as a user does: two servers that the files of a session take turns with, and others.

A file takes one or both of the session's servers for itself alone (`borrowed`), and may kill and restart them.
The next file can rely on them: they are looked at when a file ends.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import resources, util
from pathlib import Path

import psutil
import pytest

from support import services
from support.patience import patient
from support.ports import free_port
from support.session import session_folder

NEEDS_VLLM = pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)")
TOKEN = "a-token-of-the-tests-0123456789"
MODEL = str(resources.files("grpox.runfile.recipes") / "quickstart" / "model")
NAMES = ("vllm-0", "vllm-1")
OPTIONS = ("--max-model-len", "64", "--kv-cache-gib", "0.25")
"""Options of the session's two servers."""


class Served:
    """A server on a port of its own, which can be killed and started again there.

    Args:
        model: its folder.
        options: of `grpox serve`.
    """

    def __init__(self, model: str, *options: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="grpox-tests-", ignore_cleanup_errors=True)
        self._set(model, options, Path(self._temporary.name), free_port())
        self.start()

    def _set(self, model: str, options: tuple[str, ...], folder: Path, port: int) -> None:
        self._folder, self.port = folder, port
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "grpox", "serve", model, "--port", str(port), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and do not wait; see `wait_until_ready`."""
        variables = os.environ | {"OMP_NUM_THREADS": "1", "GRPOX_SERVER_TOKEN": TOKEN}
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                self._command, env=variables, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid

    def wait_until_ready(self) -> Served:
        try:
            services.wait_until(self._says_that_it_serves, f"grpox serve at {self.url}", 180, self)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self._stderr.read_text()[-4000:]}") from None
        return self

    def poll(self) -> int | None:
        """Return None while it runs, then a number: its exit code where this process has started it."""
        if self._process is not None:
            return self._process.poll()
        return None if services.is_running(self.pid) else -1

    def processes(self) -> list[psutil.Process]:
        """Return all of its processes, the one that was started first."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Kill every process of it with SIGKILL at once, as a machine that goes down."""
        everyone = self.processes()
        for each in reversed(everyone):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._wait_for(everyone)

    def interrupt(self) -> None:
        """Have it end as Ctrl-C does, and do not wait."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGINT)

    def stop(self) -> int | None:
        """End it as Ctrl-C does, and return its exit code."""
        everyone = self.processes()
        self.interrupt()
        try:
            self._wait_for(everyone)
        finally:
            for each in everyone:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        return self.poll()

    def _wait_for(self, processes: list[psutil.Process]) -> None:
        services.wait_until(
            lambda: self.poll() is not None and not any(services.is_running(each.pid) for each in processes),
            f"all of grpox serve at {self.url} ends", 60,
        )  # fmt: skip

    def _says_that_it_serves(self) -> bool:
        return self._stdout.read_text().startswith("serving ")

    @property
    def _stdout(self) -> Path:
        return self._folder / "stdout"

    @property
    def _stderr(self) -> Path:
        return self._folder / "stderr"


class Shared(Served):
    """One of the session's two servers, of the quickstart's model; it is started if it does not run.

    Args:
        name: of the service.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._facts = services.shared(name, self._begin)
        if self._process is None:
            self._set(MODEL, OPTIONS, Path(self._facts["folder"]), self._facts["port"])
            self.pid = self._facts["pid"]

    _process = None

    def _begin(self, folder: Path) -> services.Facts:
        self._set(MODEL, OPTIONS, folder, free_port())
        super().start()
        return {"pid": self.pid, "port": self.port, "folder": str(folder)}

    def start(self) -> None:
        super().start()
        self._facts = self._facts | {"pid": self.pid}
        services.restarted(self.name, self._facts)

    def restart(self) -> None:
        self.kill()
        self.start()
        self.wait_until_ready()

    def harm(self) -> str | None:
        """Return what is wrong with it: it must answer, have its model, take weights, and sample by them."""
        if self.poll() is not None:
            return "it has ended"
        try:
            self.wait_until_ready()
            difference = _difference_after_sync(self.url)
        except Exception as error:  # noqa: BLE001 - whatever a server does that is not well
            return f"{type(error).__name__}: {error}"
        return None if difference < 1e-5 else f"log-probabilities are {difference:.3g} off after a sync"


@contextmanager
def borrowed(count: int) -> Iterator[list[Shared]]:
    """Take servers of the session for one file alone, and see that they are unharmed when it ends.

    Both begin to start at once. The token of the tests is in the environment meanwhile.

    Args:
        count: 1 for any of the two, or 2.

    Raises:
        AssertionError: at the end, one was harmed; it has been started anew.
    """
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
        servers = [Shared(name) for name in _taken(count, stack)]
        for server in servers:
            server.wait_until_ready()
        yield servers
        harms = {server: server.harm() for server in servers}
        found = {server.name: harm for server, harm in harms.items() if harm}
        for server, harm in harms.items():
            if harm:
                server.restart()
        assert not found, f"this file leaves servers of the session harmed: {found}"


def _taken(count: int, stack: ExitStack) -> list[str]:
    """Return the names of servers that nobody else uses until the stack is closed; running ones come first."""
    folder = session_folder()
    files = {name: stack.enter_context((folder / f"{name}.user").open("w")) for name in NAMES}
    if count == len(NAMES):
        for file in files.values():  # in one order, or two files could wait for one another
            fcntl.flock(file, fcntl.LOCK_EX)
        return list(NAMES)
    while True:
        for name in sorted(NAMES, key=lambda name: not (folder / f"service-{name}" / "facts.json").exists()):
            with suppress(BlockingIOError):
                fcntl.flock(files[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
                return [name]
        time.sleep(0.1)


def _difference_after_sync(url: str) -> float:
    """Return how far a server's log-probabilities are from those of the policy whose weights it is sent.

    These are others first, and the model's own at last: what takes no weights cannot be right by itself.
    """
    import torch  # This takes time, which only the tests of servers have.
    from transformers import AutoModelForCausalLM

    from grpox.config import SamplingConfig
    from grpox.contracts import Prompt
    from grpox_generators.configs import VllmServerConfig
    from grpox_generators.vllm_server import VllmServerGenerator
    from support.sampling_parity import context_of, difference

    wait = min(patient(30), 1000)
    config = VllmServerConfig(urls=[url], start_timeout=wait, read_timeout=wait, retries=0)
    generator = VllmServerGenerator(config)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    generator.preflight(policy.config)
    context = context_of(policy)
    generator.start(context)
    prompt = Prompt(0, tuple(context.tokenizer("37+48=")["input_ids"]), 8)
    largest = 0.0
    try:
        for version, factor in enumerate((1.25, 0.8), start=1):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter *= factor
            generator.sync(((name, p.detach().clone()) for name, p in policy.named_parameters()), version)
            rollouts = list(generator.generate([prompt], SamplingConfig(max_completion_length=5), 5))
            largest = max(largest, difference(policy, rollouts, 1.0))
    finally:
        generator.close()
    return largest
