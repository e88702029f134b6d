"""Starts `grpox serve` as a user does, for the tests that need a server."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

TOKEN = "a-token-of-the-tests-0123456789"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """A server on a port of its own, which can be killed and started again there."""

    def __init__(self, model: str, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "grpox", "serve", model, "--port", str(self.port), *options]
        self.start()

    def start(self) -> None:
        """Returns at once; see `wait_until_ready`."""
        self._output = Path(tempfile.mkstemp(suffix=".log")[1])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GRPOX_SERVER_TOKEN": TOKEN}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=subprocess.PIPE, stderr=output, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> "Served":
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        assert line.startswith("serving "), self._output.read_text()
        return self

    def kill(self) -> None:
        """Every process of it, at once, as a machine that goes down."""
        for process in _descendants(self._process.pid):
            os.kill(process, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """As Ctrl-C does; the exit code."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(60)


def _descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
