"""Manifest, folders and shards of checkpoints: what is damaged is named, what is unfinished is not found."""

from __future__ import annotations

import json
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
from xxhash import xxh3_128

from grpox.checkpoint.folders import (
    FORMAT,
    MANIFEST,
    FileFacts,
    checkpoints_in,
    clear_unfinished,
    faults,
    folder_of,
    read_manifest,
    unfinished_of,
    write_manifest,
)
from grpox.checkpoint.rng import random_state, set_random_state
from grpox.checkpoint.shards import ShardFiles, only_weights
from grpox.runtime.files import sync

CONTENTS = {"engine/rank-0.pt": b"\0" * 1000, "engine/rank-1.pt": b"weights", "run.json": b"{}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files, two of them in a folder, and their manifest."""
    (tmp_path / "engine").mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path)
    return tmp_path


def facts(content: bytes) -> FileFacts:
    return FileFacts(len(content), xxh3_128(content).hexdigest())


def test_files_are_all_but_the_manifest_in_order_of_their_paths(folder: Path) -> None:
    (folder / "a.pt").touch()
    (folder / "engine" / MANIFEST).touch()  # another's
    (folder / "empty").mkdir()
    write_manifest(folder)
    read = read_manifest(folder)
    assert list(read) == ["a.pt", f"engine/{MANIFEST}", *CONTENTS]
    assert {name: read[name] for name in CONTENTS} == {name: facts(data) for name, data in CONTENTS.items()}
    # As published, so that no other hash will do.
    assert read["a.pt"].xxh3 == "99aa06d3014798d86001c324468d497f"


def test_the_text_of_a_manifest_is_what_earlier_and_later_versions_read(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"b.pt": FileFacts(7, "beef"), "ä.pt": FileFacts(0, "")})
    assert FORMAT == 4
    text = (tmp_path / MANIFEST).read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert text.splitlines()[:2] == ["{", ' "format": 4,']  # for people, a line each
    assert json.loads(text) == {
        "format": 4,
        "files": {"b.pt": {"size": 7, "xxh3": "beef"}, "ä.pt": {"size": 0, "xxh3": ""}},
    }


def test_a_manifest_is_on_disk_when_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []

    def fsync(descriptor: int) -> None:
        held = os.fstat(descriptor)
        synced.append((held.st_ino, held.st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    write_manifest(folder, {"a": FileFacts(1, "b")})
    path = folder / MANIFEST
    assert synced == [(path.stat().st_ino, path.stat().st_size)]


@pytest.mark.parametrize("fails", [False, True])
def test_syncing_leaves_nothing_open(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    closed: list[int] = []

    def fsync(descriptor: int) -> None:
        if fails:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    close = os.close
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))
    for path in (folder / "run.json", folder):
        if fails:
            with pytest.raises(OSError, match="Input/output error"):
                sync(path)
        else:
            sync(path)
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"{", "cannot be read: JSONDecodeError: "),
        (b"\xff", "cannot be read: UnicodeDecodeError: "),
        (b"[]", "cannot be read: TypeError: "),
        (b'{"files": {"a": {"size": 1, "xxh3": ""}}}', "cannot be read: KeyError: 'format'"),
        (b'{"format": 4}', "cannot be read: KeyError: 'files'"),
        (b'{"format": 4, "files": ["a"]}', "cannot be read: AttributeError: "),
        (b'{"format": 4, "files": {"a": {"size": 1}}}', "cannot be read: TypeError: .*xxh3"),
        (b'{"format": 4, "files": {}}', "names no files$"),
        (b'{"format": 1, "files": {}}', "its layout is version 1, this grpox reads 4$"),
        (None, "is missing$"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_its_reason(folder: Path, text: bytes | None, told: str) -> None:
    (folder / MANIFEST).unlink()
    if text is not None:
        (folder / MANIFEST).write_bytes(text)
    with pytest.raises(ValueError, match=told if "layout" in told else rf"^manifest\.json {told}"):
        read_manifest(folder)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    with pytest.raises(ValueError, match=r"^manifest\.json cannot be read: IsADirectoryError: "):
        read_manifest(folder)
    size = (folder / "engine").stat().st_size
    assert faults(folder, {"engine": FileFacts(size, "")}) == ["engine cannot be read: Is a directory"]
    assert faults(folder, {"run.json/a": FileFacts(1, "")}) == ["run.json/a cannot be read: Not a directory"]


def test_newest_first_and_nothing_unfinished(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        folder_of(tmp_path, step).mkdir(parents=True)
    unfinished_of(folder_of(tmp_path, 200)).mkdir()
    (tmp_path / "checkpoints" / "mine").mkdir()
    assert [folder.name[-3:] for folder in checkpoints_in(tmp_path)] == ["100", "020", "005"]
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
    assert files.written == {tmp_path / "state.pt": FileFacts.of(tmp_path / "state.pt")}  # hashed meanwhile
    held = files.load(str(tmp_path / "state.pt"))
    assert torch.equal(held["deep"][0][1]["tensor"], torch.arange(1000.0)) is True
    assert held["text"] == "x"


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
def test_a_file_that_cannot_be_written_is_told_once_with_reason_and_name(
    tmp_path: Path, background: bool
) -> None:
    files = ShardFiles(background)
    files.submit({"a": 1}, tmp_path / "nowhere" / "state.pt")
    [failure] = files.finished()
    assert isinstance(failure, OSError)
    assert files.finished() == []
    with nearly_full():
        files.submit({"weights": torch.zeros(10**6)}, tmp_path / "state.pt")
        [failure] = files.finished()
    assert (failure.strerror, failure.filename) == ("File too large", str(tmp_path / "state.pt"))


class Evil:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


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


def test_code_in_a_file_is_not_run_nor_in_one_that_is_read_within_a_safe_one(tmp_path: Path) -> None:
    torch.save({"a": LossScaler(1)}, tmp_path / "scaler.pt")
    torch.save({"a": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        ShardFiles(False).load(str(tmp_path / "evil.pt"))
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
