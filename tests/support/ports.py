"""Ports for the tests' servers: each worker has a range of its own, below those that the kernel deals out."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import zlib
from collections.abc import Iterator

from support.session import session_folder

FIRST, COUNT = 20_000, 600
"""The first port of all, and how many a worker has."""


def _range_of_this_worker() -> range:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = FIRST + int(worker) % 16 * COUNT
    return range(first, first + COUNT)


@functools.cache
def _ports() -> Iterator[int]:
    """Return the worker's ports without end. Each session begins elsewhere: two may run on one machine."""
    ports = _range_of_this_worker()
    begin = zlib.crc32(str(session_folder()).encode()) % COUNT
    return itertools.cycle([*ports[begin:], *ports[:begin]])


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nobody listens, and which no other worker is told."""
    for _ in range(COUNT):
        port = next(_ports())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"all ports of {_range_of_this_worker()} are taken")
