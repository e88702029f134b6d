"""A machine that is gone without a word is noticed, by the kernel's own probes of each connection to it.

A process that ends closes its connections, and whoever waits for it is told. A machine that loses power or its
network closes nothing: TCP gives up after a quarter of an hour at best, and never where nothing is under way.
gloo sets no limit of its own, but fails at once where a connection does.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

PROBES = 4
"""Unanswered, one after the other, before the connection is lost."""


def lose_silent_peers(seconds: float) -> int:
    """Have every TCP connection of this process to another machine end once that one is silent for so long.

    The kernel's answers count, not those of the process there: one that computes or stalls is not silent. On
    other systems than Linux this does nothing.

    Returns:
        how many connections there are.
    """
    if not sys.platform.startswith("linux"):
        return 0
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # one that was closed meanwhile, or listens and has no peer
            if stat.S_ISSOCK(Path(f"/proc/self/fd/{name}").stat().st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    found += _lose_if_silent(connection, seconds)
    return found


def _lose_if_silent(connection: socket.socket, seconds: float) -> bool:
    """Whether it leads to another machine."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    peer = ipaddress.ip_address(str(connection.getpeername()[0]).partition("%")[0])
    if (getattr(peer, "ipv4_mapped", None) or peer).is_loopback:
        return False
    between = max(1, round(seconds / (PROBES + 1)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    # What was sent and not acknowledged is not probed for: it has a limit of its own.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(seconds * 1000)))
    return True
