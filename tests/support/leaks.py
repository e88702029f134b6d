"""Find what a test file leaves behind: processes, threads, files, a working directory, signal handlers.

A file that leaves something fails: its last test ends in an error that names it. The processes of shared
servers (`support.processes`, `support.services`) belong to the session, not to a file. Environment variables
are put back by `environment_kept` in tests/conftest.py, because libraries set them, too.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import thread as executors
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from support.patience import patient
from support.services import is_running, running_after
from support.session import session_folder

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 2.0
"""Seconds of a quiet machine in which a process or thread may end, or a new file go again."""
CACHES = ("__pycache__", ".*_cache", "build", "*.egg-info", ".coverage*")
"""Names that tools leave in a checkout, and git ignores."""
EDITED = ("*.py", "*.md", "*.sw?", "*~", ".#*", "#*")
"""Names of files that somebody may write by hand while the tests run."""
OF_RUNS = ("*grpox*", "mlruns*", "mlartifacts*", "mlflow.db*", "runs", "out", "quickstart*")
"""Names that a run may leave in the home directory; others come there without a test."""
OF_SESSION = ("pytest-*", "grpox-tests-*", "pymp-*")
"""Temporary names that pytest, these tests' own servers and multiprocessing keep until the session ends."""
OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "support/fork_server.py")
"""Parts of the command lines of processes that serve this one until it ends."""

_made: list[str] = []
"""Paths that `tempfile` was asked for in this process; `_note_temporary_paths` appends to it."""


@dataclass(frozen=True)
class Surroundings:
    """Things outside their own folders that tests may change."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    entries: dict[Path, frozenset[str]]
    """Folder -> the names in it."""
    temporary: int
    """Paths that `tempfile` had made."""
    cwd: str
    handlers: dict[signal.Signals, Any]


def surroundings(folders: Iterable[Path]) -> Surroundings:
    """Return what is there now.

    Args:
        folders: in which new names count as left.
    """
    return Surroundings(
        frozenset(_processes()),
        frozenset(_threads()),
        {folder: _names(folder) for folder in folders},
        len(_made),
        os.getcwd(),
        {number: signal.getsignal(number) for number in SIGNALS},
    )


def left_since(before: Surroundings) -> list[str]:
    """Return a line for each thing that was left, and put the working directory and the handlers back."""
    return [
        *_left_processes(before.processes), *_left_threads(before.threads), *_left_entries(before.entries),
        *_left_temporary(before.temporary), *_left_cwd(before.cwd), *_left_handlers(before.handlers),
    ]  # fmt: skip


def watched_folders(file: Path) -> list[Path]:
    """Return the folders in which a test file must leave nothing."""
    folders = {ROOT, ROOT / "tests", ROOT / "grpox", file.parent, Path.home()}
    temporary = Path(tempfile.gettempdir())
    return sorted(folder for folder in folders if not folder.is_relative_to(temporary))


@pytest.fixture(scope="module", autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the file if it leaves anything. Of this scope the first to begin, and so the last to end."""
    before = surroundings(watched_folders(request.path))
    yield
    if left := left_since(before):
        names = "\n".join(f"  {line}" for line in left)
        pytest.fail(f"{request.node.nodeid} left behind:\n{names}", pytrace=False)


# -- Processes and threads -------------------------------------------------------------------------------


def _left_processes(before: frozenset[psutil.Process]) -> list[str]:
    new = [each for each in _processes() if each not in before]
    alive = running_after(new, patient(GRACE))
    return [f"process {each.pid}: {_command_line(each)[:200]}" for each in alive]


def _processes() -> list[psutil.Process]:
    """Return the processes below this one that are no part of a shared server."""
    shared, children = _leaders_of_services(), psutil.Process().children(recursive=True)
    servers = {
        each.pid
        for each in children
        if each.pid in shared or any(part in _command_line(each) for part in OF_PYTHON)
    }
    return [each for each in children if is_running(each.pid) and not servers & _with_parents(each)]


def _with_parents(process: psutil.Process) -> set[int]:
    with suppress(psutil.NoSuchProcess):
        return {process.pid, *(each.pid for each in process.parents())}
    return {process.pid}


def _leaders_of_services() -> set[int]:
    files = session_folder().glob("service-*/facts.json")
    pids = set()
    for file in files:
        with suppress(OSError, ValueError):  # of one that is being started or ended
            pids.add(int(json.loads(file.read_text())["pid"]))
    return pids


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "?"


def _left_threads(before: frozenset[threading.Thread]) -> list[str]:
    new = [each for each in _threads() if each not in before]
    if new:
        gc.collect()  # ends the workers of executors that nobody refers to
    for each in new:
        each.join(patient(GRACE))
    going_on = _threads() if new else []
    return [f"thread {each.name}" for each in new if each in going_on]


def _threads() -> list[threading.Thread]:
    """Return the threads that go on: no daemons, and no workers of executors that wait for work."""
    frames = sys._current_frames()
    main = threading.main_thread()
    others = [each for each in threading.enumerate() if not each.daemon and each is not main]
    return [each for each in others if not _waits_for_work(frames.get(each.ident or 0))]


def _waits_for_work(frame: FrameType | None) -> bool:
    """Return whether a thread is an executor's that has nothing to do: it ends with the process."""
    return frame is not None and frame.f_code is executors._worker.__code__


# -- Files -----------------------------------------------------------------------------------------------


def _left_entries(before: dict[Path, frozenset[str]]) -> list[str]:
    new = [folder / name for folder, names in before.items() for name in sorted(_names(folder) - names)]
    deadline = time.monotonic() + patient(GRACE)
    while any(path.exists() for path in new) and time.monotonic() < deadline:
        time.sleep(0.05)  # another worker's trial of a folder is gone at once
    return [str(path) for path in new if os.path.lexists(path)]


def _names(folder: Path) -> frozenset[str]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return frozenset()
    if folder == Path.home():
        return frozenset(name for name in names if _matches(name, OF_RUNS))
    return frozenset(name for name in names if not _matches(name, (*CACHES, *EDITED)))


def _left_temporary(before: int) -> list[str]:
    """Return what `tempfile` has made in this process directly in the temporary directory, and is still there.

    A temporary directory is shared with all other processes: of a new name in it nobody knows whose it is.
    """
    folder = tempfile.gettempdir()
    own = [path for path in _made[before:] if os.path.dirname(path) == folder]
    paths = [path for path in own if not _matches(os.path.basename(path), OF_SESSION) and os.path.exists(path)]
    if paths:
        gc.collect()  # removes a TemporaryDirectory that nobody refers to
    return [path for path in paths if os.path.exists(path)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _note_temporary_paths(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
        _made.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_temporary_paths)


# -- The process itself ----------------------------------------------------------------------------------


def _left_cwd(before: str) -> list[str]:
    try:
        now = os.getcwd()
    except FileNotFoundError:
        now = "a folder that is gone"
    os.chdir(before)
    return [f"the working directory {now}, which was {before}"] if now != before else []


def _left_handlers(before: dict[signal.Signals, Any]) -> list[str]:
    lines = []
    for number, handler in before.items():
        now = signal.getsignal(number)
        if now != handler:
            signal.signal(number, handler)
            lines.append(f"the {number.name} handler {now!r}, which was {handler!r}")
    return lines
