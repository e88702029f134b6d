"""The manifest of a checkpoint: its text, the facts of its files, and how it says that they are others now."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from xxhash import xxh3_128

from grpox.checkpoint.folders import (
    FORMAT,
    MANIFEST,
    FileFacts,
    faults,
    read_manifest,
    write_manifest,
)
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
    assert list(read_manifest(folder)) == ["a.pt", f"engine/{MANIFEST}", *CONTENTS]


def test_facts_are_the_size_and_the_xxh3_of_the_content(folder: Path) -> None:
    assert FileFacts.of(folder / "run.json") == facts(b"{}")
    assert FileFacts.of(folder / "engine/rank-1.pt") == facts(b"weights")
    assert facts(b"").xxh3 == "99aa06d3014798d86001c324468d497f"  # as published, so that no other hash will do


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
        ("{", r"^manifest\.json cannot be read: JSONDecodeError: "),
        (b"\xff", r"^manifest\.json cannot be read: UnicodeDecodeError: "),
        ("[]", r"^manifest\.json cannot be read: TypeError: "),
        ('{"files": {"a": {"size": 1, "xxh3": ""}}}', r"^manifest\.json cannot be read: KeyError: 'format'"),
        ('{"format": 4}', r"^manifest\.json cannot be read: KeyError: 'files'"),
        ('{"format": 4, "files": ["a"]}', r"^manifest\.json cannot be read: AttributeError: "),
        ('{"format": 4, "files": {"a": {"size": 1}}}', r"^manifest\.json cannot be read: TypeError: .*xxh3"),
        ('{"format": 4, "files": {}}', r"^manifest\.json names no files$"),
        ('{"format": 1, "files": {}}', r"^its layout is version 1, this grpox reads 4$"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_its_reason(folder: Path, text: str | bytes, told: str) -> None:
    (folder / MANIFEST).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=told):
        read_manifest(folder)


def test_a_manifest_that_is_missing_or_is_no_file_is_refused(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"^manifest\.json is missing$"):
        read_manifest(folder)
    (folder / MANIFEST).mkdir()
    with pytest.raises(ValueError, match=r"^manifest\.json cannot be read: IsADirectoryError: "):
        read_manifest(folder)


def flipped(path: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return "has another content than was written"


def shorter(path: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    return f"has {len(content) - 1} bytes, not {len(content)}"


def longer(path: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content + b"\0")
    return f"has {len(content) + 1} bytes, not {len(content)}"


def removed(path: Path) -> str:
    path.unlink()
    return "is missing"


@pytest.mark.parametrize("damage", [flipped, shorter, longer, removed])
@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_is_another_now_is_named(folder: Path, name: str, damage) -> None:
    wanted = read_manifest(folder)
    assert faults(folder, wanted) == []
    told = damage(folder / name)
    assert faults(folder, wanted) == [f"{name} {told}"]
    assert faults(folder, {other: held for other, held in wanted.items() if other != name}) == []


def test_a_file_that_cannot_be_read_is_named_with_the_reason(folder: Path) -> None:
    size = (folder / "engine").stat().st_size
    assert faults(folder, {"engine": FileFacts(size, "")}) == ["engine cannot be read: Is a directory"]
    assert faults(folder, {"run.json/a": FileFacts(1, "")}) == ["run.json/a cannot be read: Not a directory"]
