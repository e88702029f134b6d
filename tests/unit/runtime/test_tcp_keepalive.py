"""Connections to other machines get limits of their own; those of this one are left as they are."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from grpox.runtime.watchdog import PROBES, enable_tcp_keepalive

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is Linux's")


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname()) as client:
        yield client


def own_address() -> str:
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return str(each.address)
    pytest.skip("this machine has no address but loopback")


def limits(connection: socket.socket) -> dict[str, int]:
    tcp = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    told = {name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in tcp}
    return told | {"SO_KEEPALIVE": connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}


@pytest.mark.parametrize(("seconds", "probe"), [(50, 10), (1, 1), (2.4, 1)])
def test_a_connection_to_another_machine_is_lost_after_as_long_as_asked(seconds: float, probe: int) -> None:
    with connected(own_address()) as connection:
        before = connection.fileno()
        assert enable_tcp_keepalive(seconds) >= 1
        assert connection.fileno() == before
        connection.sendall(b"still open")
        assert limits(connection) == {
            "SO_KEEPALIVE": 1,
            "TCP_KEEPIDLE": probe,
            "TCP_KEEPINTVL": probe,
            "TCP_KEEPCNT": PROBES,
            "TCP_USER_TIMEOUT": seconds * 1000,
        }


def test_loopback_is_left_alone() -> None:
    with connected("127.0.0.1") as connection:
        before = limits(connection)
        enable_tcp_keepalive(50)
        assert limits(connection) == before
        assert before["SO_KEEPALIVE"] == 0


def test_files_that_are_no_connections_stay_unchanged() -> None:
    pair, datagrams = socket.socketpair(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener = socket.create_server((own_address(), 0))
    found = enable_tcp_keepalive(50)
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    with connected(own_address()):
        assert enable_tcp_keepalive(50) - found == 1
    for each in (*pair, datagrams, listener):
        each.close()
