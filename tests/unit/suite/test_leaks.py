"""Each kind of leak of a test file is found, and a clean file has none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from support import leaks
from support.leaks import left_since, surroundings

WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]
STARTS_ANOTHER = (
    f"import subprocess, sys; other = subprocess.Popen({WAITS}); print(other.pid, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE", 0.02)


def test_nothing_is_found_where_nothing_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").touch()
    before = surroundings([tmp_path])
    subprocess.run([sys.executable, "-c", ""], check=True)
    threading.Thread(target=int).start()
    (tmp_path / "old").unlink()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "written_by_hand.py").touch()
    with tempfile.TemporaryDirectory(), tempfile.NamedTemporaryFile():
        pass
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
    assert left_since(before) == []


def test_a_process_is_found_and_one_of_its_own() -> None:
    before = surroundings([])
    command = [sys.executable, "-c", STARTS_ANOTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        found = left_since(before)
        assert left_since(surroundings([])) == []
        process.communicate()
    assert {line.partition(":")[0] for line in found} == {f"process {process.pid}", f"process {other}"}


def test_threads_names_temporary_paths_and_the_working_directory_are_found(tmp_path: Path) -> None:
    before, end, cwd = surroundings([tmp_path]), threading.Event(), os.getcwd()
    for name, daemon in (("goes-on", False), ("background", True)):
        threading.Thread(target=end.wait, name=name, daemon=daemon).start()
    (tmp_path / "runs").mkdir()
    folder, (_, file) = tempfile.mkdtemp(), tempfile.mkstemp()
    os.chdir(tmp_path)
    try:
        *found, last = left_since(before)
        assert found == ["thread goes-on", str(tmp_path / "runs"), folder, file]
        assert last == f"the working directory {tmp_path}, which was {cwd}"
        assert os.getcwd() == cwd
    finally:
        end.set()
        os.rmdir(folder)
        os.unlink(file)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_another_signal_handler_is_found_and_put_back(number: signal.Signals) -> None:
    old, before = signal.getsignal(number), surroundings([])
    signal.signal(number, signal.SIG_IGN)
    [line] = left_since(before)
    assert line.startswith(f"the {number.name} handler ")
    assert signal.getsignal(number) is old
