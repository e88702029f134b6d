"""Starts the processes that tests need: forked from a server that has imported the heavy libraries, or cold.

``run("-m", "grpox", "train", "quickstart", cwd=folder)`` is what ``python -m grpox train quickstart`` is in a
terminal, in a third of the time. A process is started cold, by its own interpreter, where the test asks for
that (``cold=True``), where a variable differs that libraries read while they are imported, where an argument is
for the interpreter itself, and everywhere with ``GRPOX_TESTS_COLD=1``.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from support.fork_server import ENCODING
from support.patience import patient
from support.ports import free_port
from support.session import locked, session_folder

SERVER = Path(__file__).with_name("fork_server.py")
MODULES = {
    "heavy": ("support.preload_heavy",),
    "vllm": ("support.preload_heavy", "support.preload_vllm"),
}
"""Modules that each of the two servers imports."""
OF_SERVERS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "COVERAGE_PROCESS_START": ""}
"""For the servers alone: pyarrow's allocator would start a thread, and a process of several must not fork; what
a fork executes is recorded by itself (see mutants.py)."""
READ_AT_IMPORT = (
    "CUDA_", "DS_", "FORCE_COLOR", "HF_", "HOME", "HUGGINGFACE_", "KMP_", "LANG", "LC_", "LD_",
    "MALLOC_", "MKL_", "MLFLOW_CONFIGURE_LOGGING", "MLFLOW_LOGGING_LEVEL", "MPL", "NO_COLOR", "OMP_",
    "OPENBLAS_", "PYTHON", "PYTORCH_", "PY_COLORS", "TERM", "TORCH_", "TRANSFORMERS_", "TYPER_", "TZ",
    "VLLM_", "XDG_CACHE_HOME", "_TYPER_",
)  # fmt: skip
"""Beginnings of variables that an interpreter and its libraries read once, as they begin or are imported."""

SET_BY_LIBRARIES = (
    "DS_ACCELERATOR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)
"""Variables that libraries set in the tests' own process as they are imported. They are not handed on."""


class Process(ABC):
    """A started process, as `subprocess.Popen` is one; what it prints goes to files.

    Args:
        pid: of the process; of the first rank where several were forked.
    """

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._stdout, self._stderr = stdout, stderr

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that were started for it: one for each forked rank."""
        return [self.pid]

    def poll(self) -> int | None:
        """Return its return code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._poll(0)
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        """Wait until it has ended; TimeoutExpired after so many seconds of a quiet machine."""
        deadline = time.monotonic() + patient(timeout)
        while self.returncode is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill()
                raise subprocess.TimeoutExpired(f"{self.pid}: {self.output()[1][-4000:]}", timeout)
            self.returncode = self._poll(min(left, 1.0))
        return self.returncode

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Wait until it has ended and return what it printed."""
        self.wait(timeout)
        return self.output()

    def output(self) -> tuple[str, str]:
        """Return what it has printed so far, on standard output and standard error."""
        return _text(self._stdout), _text(self._stderr)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @abstractmethod
    def _poll(self, seconds: float) -> int | None:
        """Return the return code, or None if the process still runs after so many seconds."""


class _Forked(Process):
    """A process of the fork server, which tells its return code."""

    def __init__(self, connection: socket.socket, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self._connection = connection
        self._heard = b""
        pid = self._line(None)
        assert pid is not None
        assert pid.isdecimal(), f"the fork server: {pid}"
        super().__init__(int(pid), stdout, stderr)

    def _poll(self, seconds: float) -> int | None:
        line = self._line(seconds)
        if line is None:
            return None
        self._connection.close()
        return int(line)

    def _line(self, seconds: float | None) -> str | None:
        """Return what the server says next, or None where it says nothing for so long."""
        self._connection.settimeout(seconds)
        while b"\n" not in self._heard:
            try:
                part = self._connection.recv(4096)
            except (TimeoutError, BlockingIOError):
                return None
            if not part:
                raise RuntimeError("the fork server has ended; its log is beside its socket")
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()


class _Cold(Process):
    """A process of an interpreter of its own."""

    def __init__(self, process: subprocess.Popen[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        super().__init__(process.pid, stdout, stderr)
        self._process = process

    def _poll(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class _Ranks(Process):
    """Forked ranks as one process, as torchrun would be: where one fails the others are ended."""

    def __init__(self, ranks: Sequence[Process], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        super().__init__(ranks[0].pid, stdout, stderr)
        self.ranks = ranks
        self._killed_at: float | None = None

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    def _poll(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while True:
            codes = [rank.poll() for rank in self.ranks]
            if None not in codes:
                return int(any(codes))
            if any(codes):
                self._end()
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.send_signal(number)

    def _end(self) -> None:
        """Ask the ranks once to end, and kill those that do not, as torchrun does."""
        if self._killed_at is None:
            self._killed_at = time.monotonic() + patient(30)
            self.terminate()
        elif time.monotonic() > self._killed_at:
            self.kill()


def _text(file: IO[bytes]) -> str:
    """Return what a file holds; its position, at which the process goes on to write, stays."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def start(
    *arguments: str | Path,
    ranks: int = 1,
    cwd: Path | str | None = None,
    env: Mapping[str, str | None] | None = None,
    cold: bool = False,
    vllm: bool = False,
    new_session: bool = False,
) -> Process:
    """Start ``python ARGUMENTS``, under torchrun for several ranks.

    Args:
        arguments: ``-m MODULE ...``, ``-c CODE ...`` or ``SCRIPT ...``.
        ranks: processes of one world.
        cwd: working directory.
        env: variables that differ from this process's own; None takes one away.
        cold: never forked, because the process itself is what is tested.
        vllm: forked from the server that has imported vLLM, too.
        new_session: the process leads a session of its own.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in SET_BY_LIBRARIES or name in _environment_of_servers()
    }
    environment = {**inherited, "OMP_NUM_THREADS": "1", **(env or {})}
    variables = {name: value for name, value in environment.items() if value is not None}
    words = [str(argument) for argument in arguments]
    folder = str(cwd or os.getcwd())
    # Each is closed with the process's object, which tests read after its end.
    stdout, stderr = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
    why = "as the test asks" if cold else _why_cold(words, variables)
    _count(f"cold {why}" if why else "forked")
    if why:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher = launcher if ranks > 1 else []
        process = subprocess.Popen(
            [sys.executable, *launcher, *words], cwd=folder, env=variables, stdin=subprocess.DEVNULL,
            stdout=stdout, stderr=stderr, start_new_session=new_session,
        )  # fmt: skip
        return _Cold(process, stdout, stderr)

    def fork(more: Mapping[str, str]) -> Process:
        request = {
            "arguments": words, "cwd": folder, "environment": variables | more, "new_session": new_session
        }  # fmt: skip
        return fork_from(_server("vllm" if vllm else "heavy"), request, stdout, stderr)

    if ranks == 1:
        return fork({})
    port = str(free_port())
    world = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "ROLE_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"forked-{port}",
    }  # fmt: skip
    places = [
        world | {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} for rank in range(ranks)
    ]
    return _Ranks([fork(place) for place in places], stdout, stderr)


def run(
    *arguments: str | Path,
    ranks: int = 1,
    cwd: Path | str | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 240,
    cold: bool = False,
    vllm: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`start` it, wait for its end, and return what it printed and its code."""
    process = start(*arguments, ranks=ranks, cwd=cwd, env=env, cold=cold, vllm=vllm)
    stdout, stderr = process.communicate(timeout)
    return subprocess.CompletedProcess(list(map(str, arguments)), process.wait(), stdout, stderr)


def _why_cold(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return what keeps the process from being forked; empty where nothing does."""
    if os.environ.get("GRPOX_TESTS_COLD") == "1":
        return "as all are"
    if not sys.platform.startswith("linux"):
        return "on this system"
    if words[0].startswith("-") and words[0] not in ("-m", "-c"):
        return f"for {words[0]}"
    base = _environment_of_servers()
    names = {name for name in base.keys() | variables.keys() if name.startswith(READ_AT_IMPORT)}
    differing = sorted(name for name in names if base.get(name) != variables.get(name))
    return f"for {' '.join(differing)}" if differing else ""


def _count(kind: str) -> None:
    """Add one to the session's processes of a kind; see `started`."""
    with locked("processes") as folder, (folder / "processes").open("a") as file:
        file.write(f"{kind}\n")


def started() -> str:
    """Return how many processes the session has started of each kind, forked or cold and why."""
    file = session_folder() / "processes"
    kinds = Counter(file.read_text().splitlines() if file.exists() else [])
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


def remember_environment() -> None:
    """Keep the variables of this moment for the servers, unless another worker has: for a session's begin."""
    _environment_of_servers()


@functools.cache
def _environment_of_servers() -> dict[str, str]:
    """Return the variables that the servers have, equal in all workers: those that the session began with."""
    with locked("environment") as folder:
        kept = folder / "environment.json"
        if not kept.exists():
            kept.write_text(json.dumps({**os.environ, "OMP_NUM_THREADS": "1"}))
        return dict(json.loads(kept.read_text()))


_users: dict[str, socket.socket] = {}
"""A connection to each server in use: the server ends when the last worker's has closed."""


def _server(name: str) -> Path:
    """Return the address of one of the two servers, of which this worker is a user from now on."""
    address = session_folder() / f"fork-{name}"
    if name not in _users:
        with locked(f"fork-{name}"):
            _users[name] = _join(address) or start_server(address, MODULES[name], _environment_of_servers())
        atexit.register(_users[name].close)
    return address


def _join(address: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(address))
    except OSError:  # there is none yet, or it has ended
        connection.close()
        return None
    return connection


def start_server(address: Path, modules: Sequence[str], environment: Mapping[str, str]) -> socket.socket:
    """Start a fork server that has imported these modules, and return the connection of its first user."""
    address.unlink(missing_ok=True)
    log = address.with_name(f"{address.name}.log")
    with log.open("ab") as output, open(os.devnull, "rb") as nothing:
        server = subprocess.Popen(
            [sys.executable, str(SERVER), str(address), *modules], cwd=address.parent,
            env={**environment, **OF_SERVERS}, stdin=nothing, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + patient(180)
    while (connection := _join(address)) is None:
        assert server.poll() is None, f"the fork server did not start:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"the fork server takes too long:\n{log.read_text()}"
        time.sleep(0.05)
    _servers.append(server)
    return connection


_servers: list[subprocess.Popen[bytes]] = []
"""Servers that this worker has started. They outlive it while other workers use them."""


def fork_from(address: Path, request: Mapping[str, Any], stdout: IO[bytes], stderr: IO[bytes]) -> Process:
    """Ask the server at this address for a process; AssertionError with its words where it refuses."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    data = json.dumps(request).encode()
    with open(os.devnull, "rb") as nothing:
        files = [nothing.fileno(), stdout.fileno(), stderr.fileno()]
        socket.send_fds(connection, [ENCODING.pack(len(data))], files)
    connection.sendall(data)
    return _Forked(connection, stdout, stderr)
