"""The GPU of a rank: the one with its local rank, or the only visible one."""

from __future__ import annotations

import pytest
import torch

from grpox.errors import ConfigError
from grpox.runtime.launch import Place
from grpox.runtime.world import _device


def place(launcher: str, local_rank: int) -> Place:
    return Place(launcher, local_rank, 8, local_rank, 8, "gpu1", 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with GPUs, of which a test says how many."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


def test_the_gpu_of_the_ranks_number(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 8)
    assert _device(place("torchrun or deepspeed", 3)) == torch.device("cuda", 3)


def test_the_only_gpu_that_srun_shows_a_task(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    assert _device(place("srun", 3)) == torch.device("cuda", 0)


@pytest.mark.parametrize(("launcher", "count"), [("torchrun or deepspeed", 1), ("srun", 2)])
def test_more_processes_than_gpus_are_refused(gpus: pytest.MonkeyPatch, launcher: str, count: int) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError) as refused:
        _device(place(launcher, 3))
    [problem] = refused.value.problems
    assert (problem.key, problem.given) == ("LOCAL_RANK", "3")
    assert problem.allowed == f"a number below {count}: one process for each GPU"


def test_without_gpus_every_rank_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _device(place("srun", 3)) == torch.device("cpu")
