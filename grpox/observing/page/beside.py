"""The page's server as a process beside a run: `grpox train --watch`.

    python -m grpox.observing.page.beside LIFELINE

The server is a process of its own, of low priority, so that no answer takes time from a step. It ends with the
run, also when that is killed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpox.observing.page.server import address_of, new_token, open_listener, serve
from grpox.runtime.workers import Child, connect_to_parent

_NICE = 10
_STALL = 10.0
"""Seconds that the new process may take to read its message."""


@contextmanager
def serve_beside(folder: Path, port: int = 0) -> Iterator[str]:
    """Serve a run's page within the block, and yield its address.

    Args:
        folder: the run's folder; the run may not have begun.

    Raises:
        OSError: no process can be started, or the port is in use.
    """
    token = new_token()
    with open_listener(port) as listener:
        number = listener.fileno()
        child = Child(["-m", __spec__.name], _STALL, pass_fds=(number,))
        address = address_of(listener, token)
    try:
        message = {"listener": number, "token": token, "folder": str(folder.absolute())}
        child.send(json.dumps(message).encode())
        yield address
    finally:
        child.kill()


def main() -> None:
    """Serve the run that the parent process names."""
    message = json.loads(connect_to_parent().recv_bytes())
    os.nice(_NICE)
    with socket.socket(fileno=message["listener"]) as listener:
        serve(listener, message["token"], [Path(message["folder"])])


if __name__ == "__main__":
    main()
