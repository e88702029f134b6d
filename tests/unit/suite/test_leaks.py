"""Leaks of a test file are found, each kind of them, and a clean file has none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import leaks
from support.leaks import left_since, surroundings
from support.processes import run

ROOT = Path(__file__).parents[3]
WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]
STARTS_ANOTHER = (
    f"import subprocess, sys; other = subprocess.Popen({WAITS}); print(other.pid, flush=True); sys.stdin.read()"
)
LEAVES = """\
import signal


def test_a(): ...


def test_changes_the_handler():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_the_last(): ...
"""
CLEAN = """\
import signal
from pathlib import Path
import pytest


@pytest.fixture(scope="module", autouse=True)
def somewhere(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("x"))
        yield


def test_finds_all_as_it_was():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    Path("made").touch()
"""


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


def test_servers_of_the_session_and_what_they_start_are_none_of_a_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's group is told by its facts.json."""
    monkeypatch.setattr(leaks, "session_folder", lambda: tmp_path)
    before = surroundings([])
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ANOTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (tmp_path / "service-x").mkdir()
        (tmp_path / "service-x" / "facts.json").write_text(f'{{"pid": {process.pid}}}')
        assert left_since(before) == []
        process.communicate()


def test_a_thread_is_found_unless_it_is_a_daemon() -> None:
    before, end = surroundings([]), threading.Event()
    for name, daemon in (("goes-on", False), ("background", True)):
        threading.Thread(target=end.wait, name=name, daemon=daemon).start()
    try:
        assert left_since(before) == ["thread goes-on"]
    finally:
        end.set()


def test_a_worker_of_an_executor_is_found_only_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE", 0.05)
    before, both, end = surroundings([]), threading.Barrier(2), threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="works") as executor:
        executor.submit(int).result()
        assert left_since(before) == []
        executor.submit(lambda: (both.wait(), end.wait()))
        both.wait()
        try:
            assert left_since(before) == ["thread works_0"]
        finally:
            end.set()


def test_a_thread_that_is_about_to_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE", 30.0)
    before = surroundings([])
    threading.Thread(target=time.sleep, args=(0.05,)).start()
    assert left_since(before) == []


def test_a_new_name_is_found_in_a_watched_folder(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    before = surroundings([tmp_path])
    (tmp_path / "runs").mkdir()
    (tmp_path / "old").unlink()
    (tmp_path / "written_by_hand.py").touch()
    assert left_since(before) == [str(tmp_path / "runs")]


def test_in_the_home_directory_only_what_a_run_leaves_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = surroundings([tmp_path])
    for name in ("mlruns", ".grpox", "letter.txt"):
        (tmp_path / name).mkdir()
    assert left_since(before) == [str(tmp_path / ".grpox"), str(tmp_path / "mlruns")]


@pytest.mark.parametrize("make", [tempfile.mkdtemp, lambda: tempfile.mkstemp()[1]], ids=["folder", "file"])
def test_a_temporary_name_that_stays_is_found(make: Callable[[], str]) -> None:
    before = surroundings([])
    path = Path(make())
    try:
        assert left_since(before) == [str(path)]
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


def test_temporary_names_elsewhere_are_those_of_the_folder_that_they_are_in(tmp_path: Path) -> None:
    before = surroundings([])
    tempfile.mkdtemp(dir=tmp_path)
    assert left_since(before) == []


def test_another_working_directory_is_found_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getcwd()
    before = surroundings([])
    os.chdir(tmp_path)
    assert left_since(before) == [f"the working directory {tmp_path}, which was {here}"]
    assert os.getcwd() == here


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_another_signal_handler_is_found_and_put_back(number: signal.Signals) -> None:
    old = signal.getsignal(number)
    before = surroundings([])
    signal.signal(number, signal.SIG_IGN)
    [line] = left_since(before)
    assert line.startswith(f"the {number.name} handler ")
    assert signal.getsignal(number) is old


def test_the_last_test_of_the_file_is_told_and_the_next_file_passes(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(LEAVES)
    (tmp_path / "test_b.py").write_text(CLEAN)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = ("-m", "pytest", "-q", "-rA", "-p", "support.leaks", "-p", "no:cacheprovider")
    done = run(
        *command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cold=True,
    )
    assert "4 passed, 1 error" in done.stdout, done.stdout
    assert "ERROR test_a.py::test_the_last" in done.stdout
    assert re.search(r"test_a\.py left behind:\n +the SIGTERM handler ", done.stdout), done.stdout
