"""Weights on their way to servers: buckets, files, the address and lockstep of nccl, without GPU or server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from support.problems import problem_of
from test_server_client import about, fleet  # noqa: F401

from grpox.errors import RunFailed
from grpox_generators import server_weights
from grpox_generators.server_client import ServerClient
from grpox_generators.server_weights import FileSender, buckets, in_lockstep, master_address


def stream(sizes: list[int], asked: list[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for number, size in enumerate(sizes):
        if asked is not None:
            asked.append(number)
        yield str(number), torch.full((size,), float(number))


def test_buckets_hold_up_to_the_limit_in_order_and_are_asked_for_when_they_are_used() -> None:
    assert [[*bucket] for bucket in buckets(stream([2, 2, 1, 9, 1]), 16)] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [*buckets(iter(()), 16)] == []
    asked: list[int] = []
    next(buckets(stream([4] * 4, asked), 16))
    assert asked == [0, 1]


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Routes that were asked, each answered with success."""
    paths = []

    async def post(self: ServerClient, path: str, body: Any = None) -> dict[str, Any]:
        paths.append(path)
        return {}

    monkeypatch.setattr(ServerClient, "post", post)
    return paths


@pytest.fixture
def used(fleet, tmp_path, posted):  # noqa: F811
    made = fleet(about(tmp_path))
    made.look()
    return made


def test_weights_go_through_the_folder_bucket_by_bucket_and_leave_nothing(used, tmp_path, posted, monkeypatch):
    """Each file holds the copies on the host."""
    written, save = [], server_weights.save_file

    def noted(bucket, file):
        written.append({name: each.tolist() for name, each in bucket.items()})
        save(bucket, file)

    monkeypatch.setattr(server_weights, "on_host", lambda bucket: {n: 7 + each for n, each in bucket.items()})
    monkeypatch.setattr(server_weights, "save_file", noted)
    FileSender(used, 16).send(stream([4, 4]))
    assert posted == ["/start_weight_update", "/update_weights", "/update_weights", "/finish_weight_update"]
    assert [file.name for file in tmp_path.iterdir()] == ["instance"]
    assert written == [{"0": [7.0] * 4}, {"1": [8.0] * 4}]


def test_a_folder_that_is_gone_is_a_lost_server(used, tmp_path):
    (tmp_path / "instance").unlink()
    tmp_path.rmdir()
    weights = stream([4, 4])
    FileSender(used, 16).send(weights)
    assert [*weights] == []
    assert "its folder for weights is gone" in used.last_loss
    tmp_path.mkdir()


def test_a_folder_without_room_is_told_with_what_helps(used, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(server_weights, "save_file", full)
    with pytest.raises(RunFailed, match=r"No space left(.|\n)*bucket_mib"):
        FileSender(used, 16).send(stream([4]))


class OnGpu:
    """A tensor of a GPU, as far as its copy to the host asks."""

    device = torch.device("cuda", 1)


def test_a_bucket_on_a_gpu_comes_to_pinned_memory_with_one_wait(monkeypatch):
    """The copies are ordered without a wait, and the host waits for all before it reads any."""
    events = []

    class Copy:
        def copy_(self, tensor, non_blocking):
            events.append(("copy", tensor, non_blocking))
            return self

    def empty_like(tensor, *, device, pin_memory):
        events.append(("memory", torch.device(device).type, pin_memory))
        return Copy()

    def current_stream(device):
        return SimpleNamespace(synchronize=lambda: events.append(("wait", device)))

    on_cpu = {"a": torch.ones(4)}
    assert server_weights.on_host(on_cpu) is on_cpu
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    one, other = OnGpu(), OnGpu()
    assert list(server_weights.on_host({"one": one, "other": other})) == ["one", "other"]
    memory = ("memory", "cpu", True)
    assert events == [memory, ("copy", one, True), memory, ("copy", other, True), ("wait", OnGpu.device)]


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
def test_all_meet_at_the_address_that_leads_to_a_server_elsewhere(hosts, address, monkeypatch):
    monkeypatch.setattr(server_weights, "_route_to", ROUTES.__getitem__)
    assert master_address(hosts) == address


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "127.0.0.2", "[::1]:8000"])
def test_servers_here_are_met_on_loopback(host):
    assert master_address([f"http://{host}"]).startswith("127.0.0.")


def test_a_server_here_whose_name_has_ipv6_alone_is_met_on_loopback(monkeypatch):
    def resolve(host, port, family, kind):
        if family == socket.AF_INET:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(family, kind, 17, "", ("::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert master_address(["http://six:8000"]) == "127.0.0.1"


def test_a_server_elsewhere_without_ipv4_is_refused_by_name():
    problem = problem_of(master_address, ["http://[2001:db8::2]:8000"])
    assert (problem.key, problem.given) == ("generator.urls", "http://[2001:db8::2]:8000")


def test_a_rank_alone_reads_the_stream_as_it_is():
    asked: list[int] = []
    alone: Any = SimpleNamespace(world_size=1, rank=0, device=torch.device("cpu"))
    next(in_lockstep(stream([4] * 3, asked), alone, 1 << 20))
    assert asked == [0]
