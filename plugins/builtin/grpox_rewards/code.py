"""1 if the completion's Python code passes the tests of its row, each completion in a confined process."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from grpox.contracts import Text, completion_text
from grpox.errors import ConfigError, Problem
from grpox.runtime.logs import WarnOnce, get_logger
from grpox_rewards.code_process import Judgement, Limits, run_program, run_tests
from grpox_rewards.configs import CodeConfig

BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
MEANINGS = {
    "network": "the network, other processes and signals",
    "files": "the files that your user may read and write",
}


class Code:
    """``passed = tests`` or ``passed / tests``.

    The code is the last fenced block of the completion, or all of it where there is none.

    Raises:
        ConfigError: the kernel denies a part of the confinement, which the config requires.
        RuntimeError: no code can be judged on this machine.
    """

    def __init__(self, config: CodeConfig) -> None:
        self.config = config
        self.reads_columns = (config.column,)
        self._limits = Limits(config.timeout_seconds, config.memory_mib << 20)
        self._processes = config.processes or _own_cores()
        self._warn = WarnOnce(get_logger(__name__))
        probe = run_tests("", [], self._limits)
        if probe.crash:
            raise RuntimeError(f"the process that judges code failed: {probe.crash}")
        self._tell(probe.lacking)

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """One score per completion; None where it has no tests.

        Raises:
            TypeError: the tests of a row are of no form that the config names.
        """
        rows = [_checked(row) for row in columns[self.config.column]]
        tests = [[test for test in row if not (isinstance(test, str) and _asks_nothing(test))] for row in rows]
        if sum(map(len, tests)) < sum(map(len, rows)):
            told = (
                f"tests in column {self.config.column!r} that define functions and call none count as no tests"
            )
            self._warn("nothing", f"{told}: any code would pass. End each with the call, such as check(add)")
        codes = [code_in(completion_text(completion)) for completion in completions]
        with ThreadPoolExecutor(self._processes) as pool:
            judged = list(pool.map(self._judge, codes, tests))
        crashes = [made.crash for _, made in judged if made.crash]
        if log_metric is not None:
            log_metric("code/timeouts", sum(made.late for _, made in judged) / len(judged))
            log_metric("code/crashes", len(crashes) / len(judged))
        if crashes:
            told = "a process that judged code ended without a verdict, and the completion scored 0"
            self._warn("crash", f"{told} (code/crashes has their share): {crashes[0]}")
        return [score for score, _ in judged]

    def _judge(self, code: str, tests: Sequence[Any]) -> tuple[float | None, Judgement]:
        """Return the score, and what became of the code."""
        if not tests:
            return None, Judgement([])
        if isinstance(tests[0], str):
            made = run_tests(code, list(tests), self._limits)
        else:
            made = self._run_pairs(code, tests)
        share = sum(made.passed) / len(tests)
        return (share if self.config.partial else float(share == 1.0)), made

    def _run_pairs(self, code: str, pairs: Sequence[Mapping[str, str]]) -> Judgement:
        passed: list[bool] = []
        late, crash = False, ""
        for pair in pairs:
            made = run_program(code, pair["input"], self._limits)
            passed.append(made.output is not None and _lines(made.output) == _lines(pair["output"]))
            late, crash = late or made.late, crash or made.crash
            if not self.config.partial and not passed[-1]:
                break
        return Judgement(passed, late=late, crash=crash)

    def _tell(self, lacking: Sequence[str]) -> None:
        if not lacking:
            return
        open_to = " and ".join(MEANINGS[name] for name in lacking)
        what = f"this kernel or container does not let reward 'code' take from the code {open_to}"
        if self.config.confinement == "require":
            raise ConfigError(Problem(what, allowed="confinement: warn, or a machine that does"))
        self._warn("confinement", f"{what}: run it in a container or virtual machine of its own")


def code_in(text: str) -> str:
    """The last fenced block of `text`, or all of it."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _checked(row: Any) -> Sequence[Any]:
    """The tests of a row: strings, or mappings with an input and an output."""
    tests = [] if row is None else [row] if isinstance(row, str) else row
    if isinstance(tests, Sequence):
        if all(isinstance(test, str) for test in tests):
            return [test for test in tests if test.strip()]
        if all(isinstance(t, Mapping) and _is_text(t.get("input"), t.get("output")) for t in tests):
            return tests
    wanted = "a string, a list of strings, or a list of mappings with input and output, each a string"
    raise TypeError(f"tests are {wanted}, not {row!r}"[:300])


@lru_cache(maxsize=4096)
def _asks_nothing(test: str) -> bool:
    """Return True for statements that any code would pass: they only define, as a file for pytest does."""
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


def _is_text(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, or empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _own_cores() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)
