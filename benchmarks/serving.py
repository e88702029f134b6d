"""`grpox serve` for as long as a benchmark needs it."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

ENDS_WITHIN = 60
"""Seconds that the command is given to end its processes."""


@dataclass(frozen=True)
class Served:
    pid: int
    """Process id of the command; vLLM's processes are its children."""
    url: str
    environment: dict[str, str]
    """Environment variables that give a run access."""


@contextmanager
def serving(
    model: str, dtype: str, options: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """A server of `model` on a free port; it is starting, and generators wait for it.

    Args:
        variables: environment variables of the server besides those of this process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = {"GRPOX_SERVER_TOKEN": secrets.token_urlsafe(32)}
    command = [sys.executable, "-m", "grpox", "serve", model, "--port", str(port), "--dtype", dtype, *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | dict(variables or {}) | token,
            start_new_session=True,
        )
        try:
            yield Served(process.pid, f"http://127.0.0.1:{port}", token)
        except BaseException:
            log.seek(0)
            print(log.read()[-3000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(ENDS_WITHIN)
