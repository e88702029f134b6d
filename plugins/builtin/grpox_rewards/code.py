"""Reward 1 if the completion's Python code passes the tests of its row; each completion runs in a confined
process."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpox.contracts import Text, completion_text
from grpox.errors import ConfigError
from grpox.runtime.child import Child, ChildFailed, ChildLate
from grpox.runtime.logs import WarnOnce, get_logger
from grpox_rewards.configs import CodeConfig

BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
MEANINGS = {
    "network": "the network, other processes and signals",
    "files": "files that your user may read and write",
}
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
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; None for a row without tests.

        Raises:
            TypeError: the tests of a row have a form that the config does not support.
        """
        rows = [_checked(row) for row in columns[self.config.column]]
        tests = [[test for test in row if not (isinstance(test, str) and _asks_nothing(test))] for row in rows]
        if sum(map(len, tests)) < sum(map(len, rows)):
            which = f"tests in column {self.config.column!r} that define functions but call none"
            note = "count as no tests, because any code would pass; end each with a call, such as check(add)"
            self._warn("nothing", f"{which} {note}")
        codes = [code_in(completion_text(completion)) for completion in completions]
        with ThreadPoolExecutor(self._processes) as pool:
            judged = list(pool.map(self._judge, codes, tests))
        crashes = [verdict.crash for verdict in judged if verdict.crash]
        if log_metric is not None:
            log_metric("code/timeouts", sum(verdict.late for verdict in judged) / len(judged))
            log_metric("code/crashes", len(crashes) / len(judged))
        if crashes:
            note = "a process that judged code ended without a verdict, so the completion scored 0"
            self._warn("crash", f"{note} (code/crashes counts these): {crashes[0]}")
        return [self._score(verdict, len(wanted)) for verdict, wanted in zip(judged, tests, strict=True)]

    def _score(self, verdict: Judgement, count: int) -> float | None:
        if not count:
            return None
        share = sum(verdict.passed) / count
        return share if self.config.partial else float(share == 1.0)

    def _judge(self, code: str, tests: Sequence[Any]) -> Judgement:
        if tests and isinstance(tests[0], str):
            return run_tests(code, list(tests), self.config)
        passed: list[bool] = []
        late, crash = False, ""
        for pair in tests:
            verdict = run_program(code, pair["input"], self.config)
            passed.append(verdict.output is not None and _lines(verdict.output) == _lines(pair["output"]))
            late, crash = late or verdict.late, crash or verdict.crash
            if not self.config.partial and not passed[-1]:
                break
        return Judgement(passed, late=late, crash=crash)


def code_in(text: str) -> str:
    """Return the last fenced block of `text`, or all of `text` without one."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _checked(row: Any) -> Sequence[Any]:
    """Return the tests of a row: strings, or mappings with an input and an output."""
    tests = [] if row is None else [row] if isinstance(row, str) else row
    if isinstance(tests, Sequence):
        if all(isinstance(test, str) for test in tests):
            return [test for test in tests if test.strip()]
        if all(isinstance(t, Mapping) and all(isinstance(t.get(k), str) for k in PAIR) for t in tests):
            return tests
    wanted = "a string, a list of strings, or a list of mappings with input and output, each a string"
    raise TypeError(f"tests must be {wanted}, not {row!r}"[:300])


PAIR = ("input", "output")


@lru_cache(maxsize=4096)
def _asks_nothing(test: str) -> bool:
    """Return True for statements that any code would pass: they only define, like a file for pytest."""
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(_only_defines(statement) for statement in body)


def _only_defines(statement: ast.stmt) -> bool:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return not statement.decorator_list
        case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
            return True
        case ast.If(ast.Compare(ast.Name("__name__"))):  # it is not "__main__"
            return True
        case ast.Assign(value=value):
            return not any(isinstance(part, ast.Name | ast.Call | ast.Attribute) for part in ast.walk(value))
    return False


def _lines(text: str) -> list[str]:
    """Return lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run_tests(code: str, tests: list[str], config: CodeConfig) -> Judgement:
    """Return which of `tests` pass after `code` has run, within the time and memory of `config`."""
    verdict = _judged({"code": code, "input": None}, config, tests)
    return Judgement(**{"passed": [False] * len(tests), **verdict})


def run_program(code: str, text: str, config: CodeConfig) -> Judgement:
    """Return the output of the program `code` for the input `text`."""
    return Judgement(**{"passed": [], **_judged({"code": code, "input": text}, config)})


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
