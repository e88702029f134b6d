"""Leaks of a test file are found, each kind of them, and a clean file has none."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import leaks
from support.leaks import left_since, surroundings

ROOT = Path(__file__).parents[3]
WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]
STARTS_ANOTHER = (
    f"import subprocess, sys; other = subprocess.Popen({WAITS}); print(other.pid, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE", 0.02)


def test_nothing_is_found_where_nothing_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings([tmp_path])
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=int)
    thread.start()
    (tmp_path / "file").touch()
    (tmp_path / "file").unlink()
    (tmp_path / "__pycache__").mkdir()
    with tempfile.TemporaryDirectory(), tempfile.NamedTemporaryFile():
        pass
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
    assert left_since(before) == []


def test_a_process_is_found_and_one_of_its_own(tmp_path: Path) -> None:
    before = surroundings([])
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ANOTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        found = left_since(before)
        assert left_since(surroundings([])) == []
        process.communicate()
    assert {line.partition(":")[0] for line in found} == {f"process {process.pid}", f"process {other}"}


def test_a_thread_is_found_unless_it_is_a_daemon() -> None:
    before, end = surroundings([]), threading.Event()
    for name, daemon in (("goes-on", False), ("background", True)):
        threading.Thread(target=end.wait, name=name, daemon=daemon).start()
    try:
        assert left_since(before) == ["thread goes-on"]
    finally:
        end.set()


def test_a_new_name_is_found_in_a_watched_folder(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    before = surroundings([tmp_path])
    (tmp_path / "runs").mkdir()
    (tmp_path / "old").unlink()
    (tmp_path / "written_by_hand.py").touch()
    assert left_since(before) == [str(tmp_path / "runs")]


@pytest.mark.parametrize("make", [tempfile.mkdtemp, lambda: tempfile.mkstemp()[1]], ids=["folder", "file"])
def test_a_temporary_name_that_stays_is_found(make: Callable[[], str]) -> None:
    before = surroundings([])
    path = Path(make())
    try:
        assert left_since(before) == [str(path)]
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_another_signal_handler_is_found_and_put_back(number: signal.Signals) -> None:
    old = signal.getsignal(number)
    before = surroundings([])
    signal.signal(number, signal.SIG_IGN)
    [line] = left_since(before)
    assert line.startswith(f"the {number.name} handler ")
    assert signal.getsignal(number) is old
