"""Machines of one network, in network namespaces: each has its own loopback, address and cable to a switch.

And its own name of its kernel's start, by which processes tell one machine from another.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

NETWORK = "10.77.0"
CABLE = "eth0"
BOOT = "/proc/sys/kernel/random/boot_id"


class Machines:
    """`count` of them, numbered from 1, as are their addresses; what they run ends with the block.

    The switch is in a namespace of its own, so that the network of the machine that tests is left as it is.
    """

    def __init__(self, count: int) -> None:
        self._prefix = f"grpox-{os.getpid()}"
        self._numbers = range(1, count + 1)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Machines:
        refused = _ip("netns", "add", self._name(0))
        if refused is not None:
            pytest.skip(f"network namespaces cannot be made here: {refused}")
        self._boots = tempfile.TemporaryDirectory()
        try:
            self._plug_in()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for number in (0, *self._numbers):
            _ip("netns", "delete", self._name(number))
        self._boots.cleanup()

    def address(self, number: int) -> str:
        return f"{NETWORK}.{number}"

    def start(
        self, number: int, command: Sequence[str], output: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Run a command on a machine; what it prints is appended to `output`."""
        boot = Path(self._boots.name, str(number))
        boot.write_text(f"boot-of-machine-{number}\n")
        # `ip netns exec` makes a namespace of mounts too, so that nobody else sees this one.
        booted = ["sh", "-c", f'mount --bind "$0" {BOOT} && exec "$@"', str(boot)]
        with output.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._name(number), *booted, *command],
                cwd=output.parent,
                env=_plain_environment() | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def cut(self, number: int) -> None:
        """Pull the machine's cable: nothing that it or another sends arrives, and nobody is told."""
        self._set_cable(number, "down")

    def mend(self, number: int) -> None:
        self._set_cable(number, "up")

    def _plug_in(self) -> None:
        switch = self._name(0)
        _must("-n", switch, "link", "add", "bridge", "type", "bridge")
        _must("-n", switch, "link", "set", "bridge", "up")
        for number in self._numbers:
            name, port = self._name(number), f"port{number}"
            _must("netns", "add", name)
            _must("-n", name, "link", "set", "lo", "up")
            _must("-n", switch, "link", "add", port, "type", "veth", "peer", "name", CABLE, "netns", name)
            _must("-n", switch, "link", "set", port, "master", "bridge", "up")
            _must("-n", name, "address", "add", f"{self.address(number)}/24", "dev", CABLE)
            _must("-n", name, "link", "set", CABLE, "up")

    def _set_cable(self, number: int, state: str) -> None:
        _must("-n", self._name(0), "link", "set", f"port{number}", state)

    def _name(self, number: int) -> str:
        return f"{self._prefix}-{number or 'switch'}"


def _plain_environment() -> dict[str, str]:
    """This one's, less what a launcher or a user may have named for another network."""
    foreign = ("GLOO_SOCKET_IFNAME", "VLLM_HOST_IP", "MASTER_ADDR", "MASTER_PORT", "MLFLOW_TRACKING_URI")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return kept | {"OMP_NUM_THREADS": "1"}


def _must(*arguments: str) -> None:
    assert (refused := _ip(*arguments)) is None, refused


def _ip(*arguments: str) -> str | None:
    """Run `ip`; what it says where it fails."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "there is no command ip"
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
