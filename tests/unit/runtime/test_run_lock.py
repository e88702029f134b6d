"""One process at a time writes into a run's folder: who holds it is named, and who is dead holds nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.problems import problem_of

from grpox.errors import Problem
from grpox.runtime import run_lock
from grpox.runtime.run_lock import LOCKED, MARKER, hold


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE", 0.2)


HOLDS = """
import subprocess, sys
from multiprocessing import get_context
from pathlib import Path
from time import sleep
from grpox.runtime.run_lock import hold
with hold(Path(sys.argv[1])):
    forked = get_context("fork").Process(target=sleep, args=(600,))
    forked.start()
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    print(forked.pid, started.pid, flush=True)
    sleep(600)
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds `folder`, and has forked one process and started another, which outlive it."""
    command = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        try:
            yield process
            for child in children:
                os.kill(child, 0)
        finally:
            process.kill()
            process.wait()
            for child in children:
                os.kill(child, signal.SIGKILL)


def refused(folder: Path) -> Problem:
    problem = problem_of(hold(folder, "output_dir").__enter__)
    assert (problem.key, problem.given) == ("output_dir", str(folder))
    return problem


def test_who_holds_a_folder_is_named_and_once_killed_holds_it_no_longer(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as process:
        assert refused(tmp_path).what == f"is in use by process {process.pid} on {socket.gethostname()}"
        process.kill()
        process.wait()
        assert (tmp_path / LOCKED).exists()  # what is written there decides nothing
        with hold(tmp_path):
            assert refused(tmp_path).what == f"is in use by process {os.getpid()} on {socket.gethostname()}"
    assert [*tmp_path.iterdir()] == []


def test_a_new_folder_is_removed_unless_something_was_written(tmp_path: Path) -> None:
    with hold(tmp_path / "runs" / "mine"):
        assert (tmp_path / "runs" / "mine").is_dir()
    assert [*tmp_path.iterdir()] == []
    with hold(tmp_path / "runs" / "mine"):
        (tmp_path / "runs" / "mine" / "config.yaml").touch()
    assert [path.name for path in (tmp_path / "runs" / "mine").iterdir()] == ["config.yaml"]


def test_a_forked_process_that_leaves_the_block_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    child = 0
    try:
        with hold(tmp_path):
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                assert (tmp_path / LOCKED).exists()
                assert "is in use by" in refused(tmp_path).what
    finally:
        if not child:
            os._exit(0)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file/run", "x" * 300):  # whether the second is there cannot even be asked
        assert "cannot be written" in refused(tmp_path / name).what


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    (tmp_path / LOCKED).symlink_to(tmp_path / "mine.txt")
    problem = problem_of(hold(tmp_path).__enter__)
    assert (problem.given, "cannot be written" in problem.what) == (str(tmp_path / LOCKED), True)
    assert (tmp_path / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_the_kernels_locks_a_file_stands_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    (tmp_path / MARKER).write_text(f"{ended.pid}\n{host}-2\n")
    problem = refused(tmp_path)
    assert problem.what == f"is in use by process {ended.pid} on {host}-2"  # nobody here can tell
    assert f"remove {tmp_path / MARKER}" in problem.allowed
    (tmp_path / MARKER).unlink()
    with hold(tmp_path):
        pid, written, *_ = (tmp_path / MARKER).read_text().splitlines()
        assert pid == str(os.getpid())
        (tmp_path / MARKER).write_text(f"{ended.pid}\n{written}\n")
        with hold(tmp_path):  # it has ended
            assert (tmp_path / MARKER).read_text().splitlines()[0] == str(os.getpid())
    assert [*tmp_path.iterdir()] == []
