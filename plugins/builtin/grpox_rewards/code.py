"""Reward 1 if the completion's Python code passes the tests of its row; each completion runs in a confined
process."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, repeat
from pathlib import Path
from typing import Any

from grpox.contracts import Text, completion_text
from grpox.errors import ConfigError, Problem
from grpox.runtime.child import Child, ChildFailed, ChildLate
from grpox.runtime.logs import WarnOnce, get_logger
from grpox_rewards.code_remote import HIDDEN
from grpox_rewards.code_tests import FACTS, FUNCTION, Call, Pair, Test, read_tests
from grpox_rewards.configs import CodeConfig

BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
MEANINGS = {
    "network": "the network, other processes and signals",
    "files": "files that your user may read and write",
}
FIRST_ROWS = 200
"""Number of rows whose tests are asked before a run."""
EMPTY = (
    "has tests that ask nothing: any code would pass that defines their names, so the row has no score; "
    "let them assert results, as in assert add(2, 3) == 5, or call what they define, as in check(add)"
)
NAMES = re.compile(r"\b(?!__)[^\W\d]\w*")
STAND_IN = """
class Nothing:
    def __call__(self, *_, **__): return self.__class__()
    def __getattr__(self, name):
        if name[:2] == "__": raise AttributeError(name)
        return self()
globals().update((name, Nothing()) for name in %r)
"""
"""Program that defines names as objects which equal nothing, and whose results and attributes equal nothing."""
JUDGE = Path(__file__).with_name("code_judge.py")
GRACE_SECONDS = 5.0
"""Seconds added to the code's own time for the start of the interpreter, ten times what it needs."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1"}
"""Whole environment of the judging process. It has no secrets of the trainer, sets have the same order in every
run, and a Python that a test starts cannot import modules that the code left in its folder."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Judgement:
    """The outcome of the code. If its process was killed, no test passed and `late` is true."""

    passed: list[bool]
    """Outcome of each test."""
    output: str | None = None
    """Output of a program; None if the program failed."""
    late: bool = False
    lacking: tuple[str, ...] = ()
    """Parts of the confinement that the kernel denied: ``network``, ``files``."""
    crash: str = ""
    """Reason why the judging process ended without a verdict; then no test passed."""


class Code:
    """``passed = tests`` or ``passed / tests``.

    The code is the last fenced block of the completion, or the whole completion if it has none.

    Raises:
        ConfigError: the config requires the confinement, but the kernel denies a part of it.
        RuntimeError: this machine cannot judge code.
    """

    def __init__(self, config: CodeConfig) -> None:
        self.config = config
        self.reads_columns = config.reads_columns
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._processes = config.processes or max(1, len(os.sched_getaffinity(0)) // ranks)
        self._warn = WarnOnce(get_logger(__name__))
        probe = run_tests("", [], self.config)
        if probe.crash:
            raise RuntimeError(f"the process that judges code failed: {probe.crash}")
        if not probe.lacking:
            return
        open_to = " and ".join(MEANINGS[name] for name in probe.lacking)
        what = f"with this kernel or container, reward 'code' cannot keep the code from {open_to}"
        if config.confinement == "require":
            raise ConfigError(what, allowed="confinement: warn, or a machine that supports it")
        self._warn("confinement", f"{what}; use a separate container or virtual machine")

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[str]], None] | None = None,
        row_names: Sequence[str] = (),
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; None for a row without tests, or whose tests ask nothing.

        Raises:
            TypeError: the tests of a row have no known form.
        """
        names = row_names or [f"the row of completion {place}" for place in range(len(completions))]
        known = [name for name in (self.config.column, *FUNCTION, *FACTS) if name in columns]
        rows: list[tuple[Test, ...]] = []
        before = None
        for place, name in enumerate(names):
            row = {each: columns[each][place] for each in known}
            # A group's completions share one row, whose tests may take megabytes.
            rows.append(rows[-1] if row == before else read_tests(row, self.config.column, name))
            before = row
        codes = [code_in(completion_text(completion)) for completion in completions]
        with ThreadPoolExecutor(self._processes) as pool:
            judged = list(pool.map(self._judge, codes, rows))
            # By tests that ask nothing a completion gains only where it passes; the row is asked there alone.
            gains = any if self.config.partial else all
            passed = {row for row, verdict in zip(rows, judged, strict=True) if row and gains(verdict.passed)}
            asking = {row: (True,) * len(row) for row in rows}
            asking.update(zip(passed, pool.map(find_asking, passed, repeat(self.config)), strict=False))
        scores = [self._score(verdict.passed, asking[row]) for verdict, row in zip(judged, rows, strict=True)]
        empty = ["" if any(asking[row]) or not row else name for row, name in zip(rows, names, strict=True)]
        crashes = [verdict.crash for verdict in judged if verdict.crash]
        if log_metric is not None:
            log_metric("code/timeouts", sum(verdict.late for verdict in judged) / len(judged))
            log_metric("code/crashes", len(crashes) / len(judged))
            log_metric("code/empty_tests", sum(map(bool, empty)) / len(judged))
        if any(empty):
            self._warn("nothing", f"{max(empty)} {EMPTY}; code/empty_tests counts such rows")
            if log_extra is not None:
                log_extra("code/empty_tests", empty)
        if crashes:
            note = "a process that judged code ended without a verdict, so the completion scored 0"
            self._warn("crash", f"{note} (code/crashes counts these): {crashes[0]}")
        return scores

    def _score(self, passed: list[bool], asking: Sequence[bool]) -> float | None:
        if not any(asking):
            return None
        return sum(compress(passed, asking)) / sum(asking) if self.config.partial else float(all(passed))

    def _judge(self, code: str, tests: Sequence[Test]) -> Judgement:
        """Run tests until one fails; with `partial` run all."""
        in_process = [test for test in tests if not isinstance(test, Pair)]
        verdict = run_tests(code, in_process, self.config) if in_process else Judgement([])
        passed, late, crash = [*verdict.passed], verdict.late, verdict.crash
        for pair in (test for test in tests if isinstance(test, Pair)):
            if self.config.partial or all(passed):
                verdict = run_program(code, pair.input, self.config)
                passed.append(verdict.output is not None and _lines(verdict.output) == _lines(pair.output))
                late, crash = late or verdict.late, crash or verdict.crash
        return Judgement([*passed, *[False] * (len(tests) - len(passed))], late=late, crash=crash)


def code_in(text: str) -> str:
    """Return the last fenced block of `text`, or all of `text` without one."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


@lru_cache(maxsize=4096)
def _passed_by_stand_in(statements: tuple[str, ...], config: CodeConfig) -> list[bool]:
    names = {*NAMES.findall("\n".join(statements))} - HIDDEN
    return run_tests(STAND_IN % names, statements, config).passed if statements else []


def find_asking(tests: tuple[Test, ...], config: CodeConfig) -> tuple[bool, ...]:
    """Return for each test False if `STAND_IN` passes it, which defines each name in it and prints nothing."""
    passed = iter(_passed_by_stand_in(tuple(test for test in tests if isinstance(test, str)), config))
    return tuple(
        not next(passed) if isinstance(test, str) else isinstance(test, Call) or bool(_lines(test.output))
        for test in tests
    )


def check_rows(rows: Iterable[tuple[str, Mapping[str, Any]]], config: CodeConfig) -> Iterator[Problem | str]:
    """Find the first row with tests of an unknown form, and tests that ask nothing in the first rows."""
    first: dict[str, tuple[Test, ...]] = {}
    for name, row in rows:
        try:
            if (tests := read_tests(row, config.column, name)) and len(first) < FIRST_ROWS:
                first[name] = tests
        except TypeError as error:
            yield Problem(str(error), "column", given=config.column)
            return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        asking = pool.map(find_asking, first.values(), repeat(config))
        empty = [name for name, each in zip(first, asking, strict=False) if not any(each)]
    if empty:
        yield f"{empty[0]} {EMPTY} ({len(empty)} of the first {len(first)} rows with tests)"


def _lines(text: str) -> list[str]:
    """Return lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run_tests(code: str, tests: Sequence[str | Call], config: CodeConfig) -> Judgement:
    """Return which of `tests` pass after `code` has run, within the time and memory of `config`."""
    functions = [test.function for test in tests if isinstance(test, Call)]
    verdict = _judged({"code": code, "input": None, "functions": functions}, config, tests)
    return Judgement(**{"passed": [False] * len(tests), **verdict})


def run_program(code: str, text: str, config: CodeConfig) -> Judgement:
    """Return the output of the program `code` for the input `text`."""
    return Judgement(**{"passed": [], **_judged({"code": code, "input": text, "functions": []}, config)})


def _judged(about: dict[str, Any], config: CodeConfig, *more: Any) -> dict[str, Any]:
    """Return the verdict of a new process, or the reason why there is none, as fields of `Judgement`.

    The process and all that it started are killed when the time is over.
    """
    folder = tempfile.mkdtemp(prefix="grpox-code-")
    try:
        about |= {"folder": folder, "seconds": config.timeout_seconds, "memory": config.memory_mib << 20}
        most = config.timeout_seconds + GRACE_SECONDS
        deadline = time.monotonic() + most
        # Without site-packages, user settings and environment settings: the same behaviour everywhere.
        command = ["-s", "-S", "-P", str(JUDGE), str(JUDGE.parents[1])]
        child = Child(command, most, environment=ENVIRONMENT, folder=folder)
        try:
            for message in (about, *more):
                child.send(json.dumps(message).encode())
            verdict: dict[str, Any] = json.loads(child.receive(deadline))
            return verdict | {"lacking": tuple(verdict["lacking"])}
        except ChildLate:
            return {"late": True}
        except ChildFailed:
            status = child.end()
            return {"crash": child.printed.rpartition("\n")[2] or f"it ended with code {status}"}
        finally:
            child.kill()
    finally:
        remove_folder(folder)


def remove_folder(folder: str) -> None:
    """Remove a folder with everything that code has left in it, as far as the disk permits.

    Folders may be unreadable, or nested too deep for a path or for recursion. The content of a folder is
    therefore moved to the top, under a new name, before the folder is removed. No link is followed, so nothing
    outside changes.
    """
    with contextlib.suppress(OSError):
        top = os.open(folder, FOLDER)
        try:
            prefix, numbers = secrets.token_hex(), itertools.count()
            while names := os.listdir(top):
                for name in names:
                    if not _is_opened_up(name, top):
                        os.unlink(name, dir_fd=top)
                        continue
                    inside = os.open(name, FOLDER, dir_fd=top)
                    try:
                        for inner in os.listdir(inside):
                            _is_opened_up(inner, inside)  # only a writable folder can be moved
                            os.rename(inner, f"{prefix}{next(numbers)}", src_dir_fd=inside, dst_dir_fd=top)
                    finally:
                        os.close(inside)
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _is_opened_up(name: str, parent: int) -> bool:
    """Return True for a folder, after making it readable and writable."""
    try:
        handle = os.open(name, FOLDER | os.O_PATH, dir_fd=parent)
    except NotADirectoryError:
        return False
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
    return True
