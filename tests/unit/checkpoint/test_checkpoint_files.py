"""Manifest, folders and shards of checkpoints: what is damaged is named, what is unfinished is not found."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from grpox.checkpoint.folders import (
    FileFacts,
    checkpoints_in,
    clear_unfinished,
    folder_of,
    unfinished_of,
)
from grpox.checkpoint.rng import random_state, set_random_state
from grpox.checkpoint.shards import ShardFiles, only_weights


def test_newest_first_and_nothing_unfinished(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        folder_of(tmp_path, step).mkdir(parents=True)
    unfinished_of(folder_of(tmp_path, 200)).mkdir()
    (tmp_path / "checkpoints" / "mine").mkdir()
    assert [folder.name for folder in checkpoints_in(tmp_path)] == [
        "step-00000100",
        "step-00000020",
        "step-00000005",
    ]
    clear_unfinished(tmp_path)
    assert not unfinished_of(folder_of(tmp_path, 200)).exists()
    assert (tmp_path / "checkpoints" / "mine").exists()


def draws() -> tuple[float, float, float, float]:
    return random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))


def test_random_numbers_go_on_where_they_were() -> None:
    np.random.randn()  # of two that it makes, it keeps one
    state = random_state()
    first = draws()
    assert draws() != first
    set_random_state(state)
    assert draws() == first


@pytest.mark.parametrize("background", [False, True])
def test_what_is_saved_is_what_was_there_when_it_was_submitted(tmp_path: Path, background: bool) -> None:
    files = ShardFiles(background)
    tensor = torch.arange(1000.0)
    files.submit({"deep": [(1, {"tensor": tensor})], "text": "x"}, tmp_path / "state.pt")
    tensor.zero_()
    assert files.finished() == []
    assert files.done
    held = files.load(str(tmp_path / "state.pt"))
    assert torch.equal(held["deep"][0][1]["tensor"], torch.arange(1000.0)) is True
    assert held["text"] == "x"


@pytest.mark.parametrize("background", [False, True])
def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path, background: bool) -> None:
    files = ShardFiles(background)
    files.submit({"a": 1}, tmp_path / "nowhere" / "state.pt")
    [failure] = files.finished()
    assert isinstance(failure, OSError)
    assert files.finished() == []


@contextmanager
def nearly_full() -> Iterator[None]:
    """No file can grow beyond 100 kB; writing more raises what a full disk raises, but for the words.

    Not a fixture: pytest reports a test before its fixtures are undone, and what it writes to may be a file
    that is longer already.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("background", [False, True])
def test_a_file_that_does_not_fit_is_told_with_reason_and_name(tmp_path: Path, background: bool) -> None:
    files = ShardFiles(background)
    with nearly_full():
        files.submit({"weights": torch.zeros(10**6)}, tmp_path / "state.pt")
        [failure] = files.finished()
    assert (failure.strerror, failure.filename) == ("File too large", str(tmp_path / "state.pt"))


class Evil:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"a": Evil(tmp_path / "made")}, tmp_path / "state.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        ShardFiles(False).load(str(tmp_path / "state.pt"))
    assert not (tmp_path / "made").exists()


class Attribute:
    """Pickled as an attribute of something, as Python 3.11.0 to 3.11.3 pickles a member of an enum."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self.of, self.name)


def test_an_enums_member_is_read_by_name_and_no_other_attribute_is(tmp_path: Path) -> None:
    torch.save({"stage": Attribute(ZeroStageEnum, "weights")}, tmp_path / "state.pt")
    assert ShardFiles(False).load(str(tmp_path / "state.pt")) == {"stage": ZeroStageEnum.weights}
    for of, name in ((ZeroStageEnum, "__class__"), (LossScaler, "backward")):
        torch.save({"other": Attribute(of, name)}, tmp_path / "state.pt")
        with pytest.raises(Exception, match=name):
            ShardFiles(False).load(str(tmp_path / "state.pt"))


@pytest.mark.parametrize("background", [False, True])
def test_files_are_hashed_while_they_are_written(tmp_path: Path, background: bool) -> None:
    files = ShardFiles(background)
    for name in ("a.pt", "b.pt"):
        files.submit({"weights": torch.randn(10**6), "name": name}, tmp_path / name)
    assert files.finished() == []
    found = {path.name: facts for path, facts in files.written.items()}
    assert found == {name: FileFacts.of(tmp_path / name) for name in ("a.pt", "b.pt")}


def test_what_is_read_within_what_is_read_safely_takes_nothing_away(tmp_path: Path) -> None:
    torch.save({"a": LossScaler(1)}, tmp_path / "scaler.pt")
    torch.save({"a": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    with only_weights():
        ShardFiles(False).load(str(tmp_path / "scaler.pt"))
        torch.load(tmp_path / "scaler.pt", weights_only=False)
        with pytest.raises(Exception, match=r"[Ww]eights.only"):
            torch.load(tmp_path / "evil.pt", weights_only=False)
    assert not (tmp_path / "made").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_what_is_saved_a_second_time_takes_no_new_memory_and_is_as_it_is_then(tmp_path: Path) -> None:
    files = ShardFiles(background=True)
    tensors = {"a": torch.arange(1000.0), "b": torch.arange(500.0), "grows": torch.zeros(3)}
    files.submit(tensors, tmp_path / "state.pt")
    assert files.finished() == []
    used = [copy.data_ptr() for copy in files._copies["state.pt"]]
    tensors["a"] += 1
    tensors["grows"] = torch.ones(4)
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    (tmp_path / "next").mkdir()
    files.submit(tensors, tmp_path / "next" / "state.pt")
    tensors["b"].zero_()
    assert files.finished() == []
    held = files.load(str(tmp_path / "next" / "state.pt"))
    assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())
    assert [copy.data_ptr() for copy in files._copies["state.pt"]][:2] == used[:2]
    first = files.load(str(tmp_path / "state.pt"))
    assert torch.equal(first["a"], torch.arange(1000.0))
