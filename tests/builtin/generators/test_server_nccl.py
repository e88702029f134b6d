"""The transfer of weights by nccl without a GPU: the address at which it meets, and one rank alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpox.errors import ConfigError
from grpox_generators import server_nccl
from grpox_generators.server_nccl import in_lockstep, master_address

ROUTES = {
    "here": ("127.0.0.1", "127.0.0.1"),
    "this-machine": ("192.168.0.7", "192.168.0.7"),
    "elsewhere": ("10.1.0.7", "10.1.0.9"),
}
"""Host -> address of this machine on the way there, and the host's own."""


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        (["here"], "127.0.0.1"),
        (["here", "this-machine"], "192.168.0.7"),
        (["here", "this-machine", "elsewhere"], "10.1.0.7"),
        (["elsewhere", "here"], "10.1.0.7"),
    ],
)
def test_all_meet_at_the_address_that_leads_to_a_server_elsewhere(
    hosts: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_nccl, "_route_to", lambda url: server_nccl._Route(*ROUTES[url]))
    assert master_address(hosts) == address


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:8000", "http://127.0.0.2"])
def test_servers_here_are_met_on_loopback(url: str) -> None:
    assert master_address([url]).startswith("127.0.0.")


class Probe:
    """A socket to a host that has an address of IPv6 only."""

    def __init__(self, own: str) -> None:
        self.own = own

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, end: tuple[Any, ...]) -> None: ...

    def getsockname(self) -> tuple[str, int, int, int]:
        return self.own, 1, 0, 0


def over_ipv6(monkeypatch: pytest.MonkeyPatch, own: str, other: str) -> None:
    found = [(socket.AF_INET6, socket.SOCK_DGRAM, 17, "", (other, 8000, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", lambda family, kind: Probe(own))


def test_a_server_here_that_is_named_by_ipv6_is_met_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    over_ipv6(monkeypatch, "::1", "::1")
    assert master_address(["http://[::1]:8000"]) == "127.0.0.1"


def test_a_server_elsewhere_without_ipv4_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    over_ipv6(monkeypatch, "fd00::1", "fd00::2")
    with pytest.raises(ConfigError, match="no IPv4 route leads to") as refused:
        master_address(["http://[fd00::2]:8000"])
    [problem] = refused.value.problems
    assert (problem.key, problem.given) == ("generator.urls", "http://[fd00::2]:8000")


def test_a_rank_alone_reads_the_stream_as_it_is() -> None:
    requests: list[int] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            requests.append(number)
            yield str(number), torch.zeros(4)

    alone: Any = SimpleNamespace(world_size=1, rank=0, device=torch.device("cpu"))
    weights = in_lockstep(stream(), alone, 1 << 20)
    next(weights)
    assert requests == [0]
