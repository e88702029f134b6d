"""Machines of one network, in network namespaces: each has its own loopback, address and cable to a switch.

And its own name of its kernel's start, by which processes tell one machine from another.
"""

from __future__ import annotations

import getpass
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
from support import processes
from support.processes import Process

NETWORK = "10.77.0"
CABLE = "eth0"
BOOT = "/proc/sys/kernel/random/boot_id"
FOREIGN = ("GLOO_SOCKET_IFNAME", "VLLM_HOST_IP", "MASTER_ADDR", "MASTER_PORT", "MLFLOW_TRACKING_URI")
"""Variables in which a launcher or a user may have named another network."""
MOVE_IN = """
import ctypes, os, runpy, sys

NEW_NETWORK, NEW_MOUNTS, BIND, RECURSIVE, SLAVE, DETACH = 1 << 30, 1 << 17, 1 << 12, 1 << 14, 1 << 19, 2
name, boot, own, *sys.argv = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)


def done(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# As `ip netns exec` does.
with open(f"/run/netns/{name}") as network:
    done(libc.setns(network.fileno(), NEW_NETWORK))
done(libc.unshare(NEW_MOUNTS))
done(libc.mount(b"", b"/", b"none", ctypes.c_ulong(SLAVE | RECURSIVE), None))
done(libc.umount2(b"/sys", DETACH))
done(libc.mount(name.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None))
done(libc.mount(boot.encode(), own.encode(), None, ctypes.c_ulong(BIND), None))
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""A program that moves onto a machine and there becomes ``python -m MODULE ...``."""


class Machines:
    """`count` of them, numbered from 1, as are their addresses; what they run ends with the block.

    The switch is in a namespace of its own, so that the network of the machine that tests is left as it is.
    """

    def __init__(self, count: int) -> None:
        self._prefix = f"grpox-{os.getpid()}"
        self._numbers = range(1, count + 1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._forked: list[Process] = []

    def __enter__(self) -> Machines:
        refused = _ip("netns", "add", self._name(0))
        if refused is not None:
            pytest.skip(f"network namespaces cannot be made here: {refused}")
        # What is killed on the machines leaves its own temporary files there, too; but compiles nothing anew.
        self._files = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        compiled = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        self._variables = {"TMPDIR": self._files.name, "TORCHINDUCTOR_CACHE_DIR": compiled}
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
        for forked in self._forked:
            forked.kill()
            forked.wait()
        for number in (0, *self._numbers):
            _ip("netns", "delete", self._name(number))
        self._files.cleanup()

    def address(self, number: int) -> str:
        return f"{NETWORK}.{number}"

    def start(
        self, number: int, command: Sequence[str], output: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Run a command on a machine; what it prints is appended to `output`."""
        boot = self._boot(number)
        # `ip netns exec` makes a namespace of mounts too, so that nobody else sees this one.
        booted = ["sh", "-c", f'mount --bind "$0" {BOOT} && exec "$@"', str(boot)]
        with output.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._name(number), *booted, *command],
                cwd=output.parent,
                env=_plain_environment() | self._variables | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def fork(self, number: int, *arguments: str, folder: Path, **environment: str) -> Process:
        """Run ``python -m ARGUMENTS`` on a machine, forked from the server of the tests."""
        own = (self._name(number), self._boot(number), BOOT)
        variables = dict.fromkeys(FOREIGN) | self._variables | environment
        self._forked.append(processes.start("-c", MOVE_IN, *own, *arguments, cwd=folder, env=variables))
        return self._forked[-1]

    def _boot(self, number: int) -> Path:
        boot = Path(self._files.name, str(number))
        boot.write_text(f"boot-of-machine-{number}\n")
        return boot

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
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return kept | {"OMP_NUM_THREADS": "1"}


def _must(*arguments: str) -> None:
    assert (refused := _ip(*arguments)) is None, refused


def _ip(*arguments: str) -> str | None:
    """Run `ip`; what it says where it fails."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "there is no command ip"
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
