"""The ranks of a run: interfaces on which they listen, their GPUs, and work that fails on one of them."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ports import free_port
from support.problems import problem_of

from grpox.errors import RankLost, RunFailed
from grpox.runtime import world
from grpox.runtime.launch import Place
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World, meeting_store, name_interface

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interface is named, and a launch of two machines with a rank each."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "gpu1"}.items():
        monkeypatch.setenv(name, value)


def place(address: str, port: int = 1, rank: int = 0) -> Place:
    return Place("srun", rank, 2, 0, 1, address, port)


def network(monkeypatch: pytest.MonkeyPatch, towards: str, **interfaces: str) -> None:
    """A machine with these interfaces, on which the way to rank 0 begins at the address `towards`."""
    addresses = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in interfaces.items()
    }
    found = SimpleNamespace(
        net_if_addrs=lambda: addresses,
        net_if_stats=lambda: {name: SimpleNamespace(isup=True) for name in addresses},
    )

    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, _: object) -> None: ...
        def getsockname(self) -> tuple[str, int]:
            return towards, 1

    monkeypatch.setattr(world, "psutil", found)
    monkeypatch.setattr(world, "_resolved", lambda host, port: (socket.AF_INET, (host, port)))
    monkeypatch.setattr(world.socket, "socket", Probe)


@pytest.mark.parametrize(
    ("variables", "towards", "interfaces", "expected"),
    [
        ({}, "10.1.0.7", {"lo": "127.0.0.1", "eth0": "192.168.0.7", "ib0": "10.1.0.7"}, ("ib0", "10.1.0.7")),
        # Where rank 0's name is loopback: the only other interface.
        ({}, "127.0.1.1", {"lo": "127.0.0.1", "eth0": "192.168.0.7"}, ("eth0", "192.168.0.7")),
        ({"GLOO_SOCKET_IFNAME": "ib1"}, "10.1.0.7", {"ib0": "10.1.0.7"}, ("ib1", None)),
        ({"LOCAL_WORLD_SIZE": "2"}, "10.1.0.7", {"ib0": "10.1.0.7"}, ("lo", "127.0.0.1")),
    ],
)
def test_gloo_listens_on_the_users_interface_else_loopback_else_the_one_that_leads_to_rank_0(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    towards: str,
    interfaces: dict[str, str],
    expected: tuple[str, str | None],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    network(monkeypatch, towards, **interfaces)
    name_interface(place("gpu1"))
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("VLLM_HOST_IP")) == expected
    assert "NCCL_SOCKET_IFNAME" not in os.environ  # weights may have to reach a server elsewhere


def test_of_several_others_the_user_has_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    network(monkeypatch, "127.0.1.1", lo="127.0.0.1", eth0="192.168.0.7", ib0="10.1.0.7")
    problem = problem_of(name_interface, place("gpu1"))
    assert (problem.key, problem.given) == ("MASTER_ADDR", "gpu1")
    for fact in ("(192.168.0.7, 10.1.0.7)", "GLOO_SOCKET_IFNAME"):
        assert fact in problem.allowed


def test_a_machine_that_nobody_knows_is_told() -> None:
    problem = problem_of(name_interface, place("no-such-machine.invalid"))
    assert (problem.key, "cannot reach the machine of rank 0" in problem.what) == ("MASTER_ADDR", True)


def test_torchruns_own_store_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert meeting_store(place("127.0.0.1"), timedelta(seconds=1)) is None


def test_a_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = problem_of(meeting_store, place("127.0.0.1", port), timedelta(seconds=5))
    assert (problem.key, problem.given) == ("MASTER_PORT", f"127.0.0.1:{port}")


def test_ranks_that_do_not_come_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    port = free_port()
    with pytest.raises(RunFailed, match=f"rank 0 of 2 could not connect to the others at 127.0.0.1:{port}"):
        meeting_store(place("127.0.0.1", port), timedelta(seconds=1))
    told = str(world.not_met(place("gpu1", 7, rank=1), RuntimeError("connection\n  refused")))
    assert told.startswith("rank 1 of 2 could not connect to the others at gpu1:7")
    assert socket.gethostname() in told
    assert told.endswith("connection refused")


@pytest.mark.parametrize(
    ("launcher", "count", "device"),
    [
        ("torchrun or deepspeed", 8, "cuda:3"),
        ("srun", 1, "cuda:0"),  # the only one that srun shows
        ("srun", 0, "cpu"),
        ("torchrun or deepspeed", 1, None),
        ("srun", 2, None),
    ],
)
def test_a_rank_has_the_gpu_of_its_number_and_more_processes_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, launcher: str, count: int, device: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    rank = Place(launcher, 3, 8, 3, 8, "gpu1", 1)
    if device is not None:
        assert world._device(rank) == torch.device(device)
        return
    problem = problem_of(world._device, rank)
    assert (problem.key, problem.given) == ("LOCAL_RANK", "3")
    assert problem.allowed == f"a number below {count}: one process for each GPU"


@pytest.mark.parametrize(("phase", "named"), [("update", " in phase 'update'"), (None, "")])
def test_the_phase_is_named_where_there_is_one(phase: str | None, named: str) -> None:
    sent: list[Any] = []

    class SentParts(World):
        """A rank of two that gathers its own parts alone, and lists what it sends."""

        def gather(self, parts: Any) -> Any:
            sent.extend(parts)
            return list(parts)

    def work() -> None:
        with times.phase(phase) if phase else nullcontext():
            raise RunFailed("loss 'Mine' raised KeyError: 'cap'")

    times = PhaseTimes()
    with pytest.raises(RunFailed, match="KeyError"):
        world.run_and_gather(SentParts(1, 2, torch.device("cpu")), times, work)
    assert sent == [(f"rank 1 failed{named}: loss 'Mine' raised KeyError: 'cap'", [])]


def test_a_rank_that_is_lost_between_phases_is_told_so() -> None:
    rank, phase = World(rank=0, size=2, device=torch.device("cpu")), "in phase 'between phases'"
    with pytest.raises(RankLost, match=phase), world.translate_lost_ranks(rank, PhaseTimes()):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:5")
