"""Breaks grpox in places drawn by a seed, one line each, and tells which of them no test notices.

    python tests/support/mutants.py contexts [FOLDER ...]    # which tests execute which line, once a commit
    python tests/support/mutants.py sample --seed 1 --count 240 --out FILE [--resume]
    python tests/support/mutants.py again SAMPLE --out FILE [--resume]    # those whose lines still exist
    python tests/support/mutants.py line grpox/update/packing.py:120    # what catches a change of this line

A mutant is a change of one line: a comparison flipped, a constant off by one, a statement dropped. A sample is
drawn over all packages, in proportion to their lines. Each mutant is made in a copy of the tree, and tried by
the tests that execute its line: those in one process, the lightest first, until one fails, then at most eight
files of whole runs or services, within a limit of time. The mutant is caught, broken if its file does not
import, endless if the tests take far longer than without it, or it has survived. A test counts only if it
passes in a copy without the mutant.

`contexts` runs the tests once under coverage.py (``pip install coverage``), forked processes included, some
folders after others if they are named.
Libraries are imported once: each trial is a fork that imports grpox from the copy. After an interruption
``--resume`` goes on where the sample ended.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SOURCES = ("grpox", "plugins/builtin")
CONTEXTS = ROOT / "build" / "contexts"
"""The folder that `contexts` writes: the lines of each test, and the seconds that it takes."""
COPIED = (*SOURCES, "plugins/examples", "tests", "docs", "examples", "benchmarks")
COPIED += ("pyproject.toml", "README.md")
LIGHT = ("unit", "builtin", "contract", "fuzz", "docs")
"""Folders of tests that run in one process."""
BATCHES = (6, 18)
"""Test files in the first and in each further process: each must import its files before it begins."""
SECONDS = 60.0
"""Time that the light tests of one mutant may take."""
HEAVY = 8
"""Number of files of whole runs or services that try a mutant. The tests of a file share its run or service."""
HEAVY_SECONDS = 90.0
"""Time that these files may take."""
JOBS = 2
PHASE = re.compile(r" \((setup|call|teardown)\)$")
"""Phase of a test, in the name that pytest gives it in the processes that it starts."""
LIBRARIES = ("torch", "transformers", "deepspeed", "datasets", "mlflow", "peft", "pytest", "pydantic")

FLIPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any", "is_file": "is_dir", "MIN": "MAX"}
WITHOUT_EFFECT_ON_SHAPE = ("detach", "clone", "float", "clamp", "unsqueeze", "isnan", "isfinite", "close")
MESSAGES = ("Problem", "print", "warn", "RunFailed", "ValueError")
"""Calls whose texts nobody computes with."""
SHOWN = ("markup", "highlight", "soft_wrap", "style", "encoding", "strict")
"""Arguments that say how a text is shown, or that check only."""
ANY_ORDER = ("max", "min", "gcd")


@dataclass(frozen=True)
class Mutant:
    """One change of one line of a file."""

    path: str
    line: int
    what: str
    old: str
    new: str

    def source(self, tree: Path) -> str:
        """Return the file of `tree` with the change."""
        lines = (tree / self.path).read_text(encoding="utf-8").splitlines(keepends=True)
        lines[self.line - 1] = f"{self.new}\n"
        return "".join(lines)


class Mutations(ast.NodeVisitor):
    """Every change of one line of a file, in the order of its nodes; some are no Python."""

    def __init__(self, path: str) -> None:
        self.path = path
        text = (ROOT / path).read_text(encoding="utf-8")
        self.lines = text.encode().splitlines()
        self.found: list[Mutant] = []
        self.in_message = 0
        self.visit(ast.parse(text))

    # -- parts that are left out -------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._body(node.body)

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._body(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    # -- statements --------------------------------------------------------------------------------------

    def _body(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # docstrings
            self.visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        self._change(node, "pass", "statement dropped")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Attribute | ast.Subscript):  # without a name it would only be missing
            self._change(node, "pass", "assignment dropped")
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for each in node.value.elts:
                self.visit(each)
        else:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._change(node, "pass", "assignment dropped")
        target, value = ast.unparse(node.target), ast.unparse(node.value)
        self._change(node, f"{target} = {value}", "only the last is kept")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._change(node, "pass", "raise dropped")
        self.in_message += 1
        self.generic_visit(node)
        self.in_message -= 1

    def visit_Continue(self, node: ast.Continue) -> None:
        self._change(node, "pass", "continue dropped")
        self._change(node, "break", "continue to break")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        self._change(node.value, "0" if is_none else "None", "another return value")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self._change(node, f"({ast.unparse(node.body)})", "always the first")
        self._change(node, f"({ast.unparse(node.orelse)})", "always the second")
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if isinstance(node.type, ast.Tuple):
            for dropped in node.type.elts:
                kept = [ast.unparse(each) for each in node.type.elts if each is not dropped]
                self._change(node.type, f"({', '.join(kept)},)", f"{ast.unparse(dropped)} not caught")
        for each in node.body:
            self.visit(each)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._condition(condition)
            self._change(condition, "True", "condition dropped")
        self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> None:
        for each in node.body:
            self.visit(each)

    # -- expressions -------------------------------------------------------------------------------------

    def _condition(self, node: ast.expr) -> None:
        if not isinstance(node, ast.Compare | ast.UnaryOp):
            self._change(node, f"(not ({ast.unparse(node)}))", "condition negated")

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            for other in FLIPPED.get(type(operator), ()):
                operators = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                made = ast.Compare(node.left, operators, node.comparators)  # type: ignore[arg-type]
                self._change(node, ast.unparse(made), "comparison flipped")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        for other in FLIPPED.get(type(node.op), ()):
            made = ast.BinOp(node.left, other(), node.right)  # type: ignore[arg-type]
            self._change(node, ast.unparse(made), "operator changed")
        if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
            made = ast.BinOp(node.right, node.op, node.left)
            self._change(node, ast.unparse(made), "operands swapped")
        for kept in (node.left, node.right):
            self._change(node, f"({ast.unparse(kept)})", "one operand only")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        (other,) = FLIPPED[type(node.op)]
        self._change(node, f"({ast.unparse(ast.BoolOp(other(), node.values))})", "operator changed")  # type: ignore[arg-type]
        for dropped in node.values:
            kept = [each for each in node.values if each is not dropped]
            made = kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)
            self._change(node, f"({ast.unparse(made)})", "operand dropped")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._change(node, f"({ast.unparse(node.operand)})", "not or minus dropped")
        if not isinstance(node.operand, ast.Constant):
            self.visit(node.operand)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._change(node, str(not value), "boolean negated")
        elif isinstance(value, int | float):
            for other in (value + 1, value - 1):
                self._change(node, f"({other})" if other < 0 else str(other), "constant off by one")
        elif isinstance(value, str) and not self.in_message:
            self._change(node, repr(f"{value}x" if value else "x"), "another text")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in RENAMED:
            self._change(node, RENAMED[node.id], "another function")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in RENAMED:
            self._change(node, f"{ast.unparse(node.value)}.{RENAMED[node.attr]}", "another function")
        self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice):
            bounds = node.slice
            for lower in _off_by_one(bounds.lower, "1"):
                self._slice(node, ast.Slice(lower, bounds.upper, bounds.step))
            for upper in _off_by_one(bounds.upper, "-1"):
                self._slice(node, ast.Slice(bounds.lower, upper, bounds.step))
            if bounds.step is not None:
                self._slice(node, ast.Slice(bounds.lower, bounds.upper, None))
        else:
            self.visit(node.slice)
        self.visit(node.value)

    def _slice(self, node: ast.Subscript, changed: ast.Slice) -> None:
        self._change(node, ast.unparse(ast.Subscript(node.value, changed, node.ctx)), "slice bound")

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        self._change_call(node, name)
        message = name in MESSAGES
        self.in_message += message
        self.generic_visit(node)
        self.in_message -= message

    def _change_call(self, node: ast.Call, name: str) -> None:
        function, arguments = node.func, node.args
        if name in WITHOUT_EFFECT_ON_SHAPE and isinstance(function, ast.Attribute):
            self._change(node, ast.unparse(function.value), f"{name} dropped")
        if name == "sorted":
            self._change(node, f"list({ast.unparse(arguments[0])})", "sorted dropped")
        for place in range(len(arguments) - 1 if name not in ANY_ORDER else 0):
            swapped = [*arguments]
            swapped[place : place + 2] = swapped[place + 1], swapped[place]
            self._change(node, ast.unparse(ast.Call(function, swapped, node.keywords)), "arguments swapped")
        if len(arguments) > 1 and not isinstance(arguments[-1], ast.Starred):
            fewer = ast.Call(function, arguments[:-1], node.keywords)
            self._change(node, ast.unparse(fewer), "last argument dropped")
        for each in node.keywords:
            if each.arg in SHOWN:
                continue
            kept = [keyword for keyword in node.keywords if keyword is not each]
            self._change(node, ast.unparse(ast.Call(function, arguments, kept)), f"{each.arg} not given")

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in SHOWN:
            self.visit(node.value)

    def visit_Dict(self, node: ast.Dict) -> None:
        for dropped in range(len(node.values)):
            keys = [key for place, key in enumerate(node.keys) if place != dropped]
            values = [value for place, value in enumerate(node.values) if place != dropped]
            self._change(node, ast.unparse(ast.Dict(keys, values)), "entry dropped")
        self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        self._elements(node, node.elts)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._elements(node, node.elts)

    def _elements(self, node: ast.List | ast.Tuple, elements: Sequence[ast.expr]) -> None:
        if isinstance(node.ctx, ast.Store):
            return
        for dropped in elements:
            kept = [each for each in elements if each is not dropped]
            self._change(node, f"({ast.unparse(type(node)(kept, node.ctx))})", "element dropped")
        for each in elements:
            self.visit(each)

    # -- the text ----------------------------------------------------------------------------------------

    def _change(self, node: ast.expr | ast.stmt, text: str, what: str) -> None:
        """Add the mutant in which `text` stands in the place of `node`, if that is on one line."""
        if node.end_lineno == node.lineno:
            old = self.lines[node.lineno - 1]
            new = old[: node.col_offset] + text.encode() + old[node.end_col_offset :]
            self.found.append(Mutant(self.path, node.lineno, what, old.decode(), new.decode()))


def _off_by_one(bound: ast.expr | None, none: str) -> Iterator[ast.expr]:
    if bound is None:
        yield ast.parse(none, mode="eval").body
        return
    for operator in (ast.Add(), ast.Sub()):
        yield ast.BinOp(bound, operator, ast.Constant(1))


def is_change(mutant: Mutant) -> bool:
    """True: the file with the change is Python, and another program."""
    with contextlib.suppress(SyntaxError):
        before = (ROOT / mutant.path).read_text(encoding="utf-8")
        return ast.dump(ast.parse(mutant.source(ROOT))) != ast.dump(ast.parse(before))
    return False


# -- Drawing ---------------------------------------------------------------------------------------------


def package_of(path: str) -> str:
    """Return the room of grpox, or the package of built-in components."""
    parts = Path(path).parts[:-1]
    return "/".join(parts[: 3 if parts[0] == "plugins" else 2])


def drawn(seed: int, count: int) -> list[Mutant]:
    """Draw lines of each package, in proportion to its number of lines, and of each line one mutant."""
    packages = defaultdict(list)
    for path in git("ls-files", "--", *(f"{folder}/*.py" for folder in SOURCES)):
        packages[package_of(path)].append(path)
    lines = {name: sum(_line_count(path) for path in paths) for name, paths in packages.items()}
    shares = {name: count * number / sum(lines.values()) for name, number in lines.items()}
    wanted = {name: int(share) for name, share in shares.items()}
    for name in sorted(shares, key=lambda each: wanted[each] - shares[each])[: count - sum(wanted.values())]:
        wanted[name] += 1
    return [mutant for name in sorted(packages) for mutant in _drawn_of(packages[name], wanted[name], seed)]


def _line_count(path: str) -> int:
    return len((ROOT / path).read_bytes().splitlines())


def _drawn_of(paths: Sequence[str], count: int, seed: int) -> Iterator[Mutant]:
    generator = random.Random(f"{seed} {paths[0]}")
    at: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for path in paths:
        for mutant in Mutations(path).found:
            at[path, mutant.line].append(mutant)
    for place in generator.sample(sorted(at), len(at)):
        if count == 0:
            return
        choices = generator.sample(at[place], len(at[place]))
        if (chosen := next(filter(is_change, choices), None)) is not None:
            count -= 1
            yield chosen


def still_there(mutants: Iterable[dict[str, Any]]) -> Iterator[Mutant]:
    """Yield the mutants whose line still exists, once in its file or in the file of this name elsewhere."""
    texts = {
        path: (ROOT / path).read_text(encoding="utf-8").splitlines()
        for path in git("ls-files", "--", *(f"{folder}/*.py" for folder in SOURCES))
    }
    for each in mutants:
        old = each["old"]
        places = [(path, n) for path, lines in texts.items() for n, line in enumerate(lines, 1) if line == old]
        own = [place for place in places if place[0] == each["path"]]
        nearest = sorted(own, key=lambda place: abs(place[1] - each["line"]))[:1]
        for path, line in nearest or (places if len(places) == 1 else []):
            yield Mutant(path, line, each["what"], old, each["new"])


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


# -- Which tests execute a line --------------------------------------------------------------------------

_seconds: Counter[str] = Counter()
_failed: set[str] = set()


def pytest_runtest_protocol(item: Any) -> None:
    """Name the test whose lines coverage.py records from here on."""
    import coverage

    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    _seconds[report.nodeid] += report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: Any) -> None:
    if not hasattr(session.config, "workerinput"):
        file = CONTEXTS / "seconds.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        passed = {name: seconds for name, seconds in _seconds.items() if name not in _failed}
        file.write_text(json.dumps(before | passed))


def record_contexts(folders: Sequence[str]) -> None:
    """Run the tests once, and add which lines each of them executes to what is known of this commit."""
    import coverage

    commit, file = git("rev-parse", "HEAD")[0], CONTEXTS / "commit"
    if not file.exists() or file.read_text() != commit:
        shutil.rmtree(CONTEXTS, ignore_errors=True)
        CONTEXTS.mkdir(parents=True)
        file.write_text(commit)
    settings = CONTEXTS / "settings"
    sources = "".join(f"\n    {ROOT / folder}" for folder in SOURCES)
    settings.write_text(
        f"[run]\nsource ={sources}\ndata_file = {CONTEXTS / 'data'}\nparallel = true\n"
        "context = ${PYTEST_CURRENT_TEST-}\npatch = fork,_exit\ndisable_warnings = no-data-collected\n"
    )
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("tests", ".", "plugins/builtin"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        str(JOBS),
        "--dist",
        "loadfile",
        "-p",
        "support.mutants",
    ]
    subprocess.run(
        [*command, "-p", "support.mutants", "-p", "no:cacheprovider", "--no-loadscope-reorder", *folders],
        cwd=ROOT,
        env={**os.environ, "COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": paths},
        check=False,  # a test that fails is left out
    )
    collected = coverage.Coverage(config_file=str(settings))
    collected.load()
    collected.combine()
    collected.save()


class Contexts:
    """The tests that execute a line, and how long they take."""

    def __init__(self) -> None:
        import coverage

        commit = (CONTEXTS / "commit").read_text() if (CONTEXTS / "commit").exists() else None
        if commit is None or git("diff", "--name-only", commit, "--", *SOURCES):
            sys.exit("which tests execute which line is not known of this commit: run `mutants.py contexts`")
        self.seconds: dict[str, float] = json.loads((CONTEXTS / "seconds.json").read_text())
        self._data = coverage.CoverageData(str(CONTEXTS / "data"))
        self._data.read()

    @cache  # noqa: B019 - one object, for as long as the process lasts
    def _lines(self, path: str) -> dict[int, set[str]]:
        recorded = self._data.contexts_by_lineno(str(ROOT / path))
        return {line: {PHASE.sub("", name) for name in names} for line, names in recorded.items()}

    def tests(self, mutant: Mutant) -> list[list[str]]:
        """Return the tests in batches: the light ones, then the heavy ones file by file.

        The tests of a line that runs at import alone are those of its file.
        """
        lines = self._lines(mutant.path)
        names = lines.get(mutant.line, set()) & self.seconds.keys() or {
            name for each in lines.values() for name in each if name in self.seconds
        }
        ordered = sorted(names, key=lambda name: (self.seconds[name], name))
        is_light = {name: name.split("/")[1] in LIGHT for name in ordered}
        files: dict[str, list[str]] = defaultdict(list)
        left = SECONDS
        for name in ordered:
            if is_light[name] and left > 0:
                left -= self.seconds[name]
                files[name.partition("::")[0]].append(name)
        listed = list(files.values())
        bounds = [0, *range(BATCHES[0], len(listed), BATCHES[1]), len(listed)]
        batches = [[name for each in listed[start:end] for name in each] for start, end in pairwise(bounds)]
        heavy: dict[str, list[str]] = defaultdict(list)
        for name in ordered:
            if not is_light[name]:
                heavy[name.partition("::")[0]].append(name)
        left = HEAVY_SECONDS
        for file in sorted(heavy, key=self._seconds_of_file)[:HEAVY]:
            left -= self._seconds_of_file(file)
            if left > 0:
                batches.append(heavy[file])
        return [batch for batch in batches if batch]

    @cache  # noqa: B019 - one object, for as long as the process lasts
    def _seconds_of_file(self, file: str) -> float:
        """Return the time of all tests of a file: the first of them has that of what they share."""
        return sum(seconds for name, seconds in self.seconds.items() if name.startswith(f"{file}::"))


# -- Trying ----------------------------------------------------------------------------------------------


class Failure:
    """Plugin of pytest: writes the name of the test that fails first."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)


@dataclass
class Runner:
    """Tries mutants one after the other in a copy of the tree."""

    folder: Path
    seconds: dict[str, float]

    def __post_init__(self) -> None:
        self.tree = copy_tree(self.folder / "tree")
        self.passing: dict[str, bool] = {}
        """True of a test that passes in the copy without a mutant."""

    def outcome(self, mutant: Mutant, batches: Iterable[Sequence[str]]) -> tuple[str, str | None]:
        """Return the state of a mutant, and the test that caught it."""
        file = self.tree / mutant.path
        before = file.read_text(encoding="utf-8")
        for batch in batches:
            while names := [name for name in batch if self.passing.get(name, True)]:
                file.write_text(mutant.source(self.tree), encoding="utf-8")
                try:
                    state, test = self._run(names)
                finally:
                    file.write_text(before, encoding="utf-8")
                if state == "passed":
                    break
                if all(self._passes(name) for name in ([test] if test else names)):
                    return state, test
        return "survived", None

    def _passes(self, name: str) -> bool:
        if name not in self.passing:
            self.passing[name] = self._run([name])[0] == "passed"
        return self.passing[name]

    def _run(self, names: Sequence[str]) -> tuple[str, str | None]:
        failure, log = self.folder / "failure", self.folder / "log"
        failure.unlink(missing_ok=True)
        limit = 60 + 3 * sum(self.seconds[name] for name in names)
        began, pid = time.monotonic(), os.fork()
        if pid == 0:
            _test(self.tree, names, failure, log)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() - began > limit:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._end_services()
                return "endless", None
            time.sleep(0.02)
        self._end_services()
        code = os.waitstatus_to_exitcode(ended[1])
        if failure.exists():
            return "caught", failure.read_text()
        return ("passed", None) if code in (0, 5) else ("broken", None)  # 5: no such test any more

    def _end_services(self) -> None:
        """Kill what a trial has left behind in sessions of its own, such as servers."""
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.tree) in argument for argument in process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _test(tree: Path, names: Sequence[str], failure: Path, log: Path) -> None:
    """In the child: run the tests in the copy. Does not return."""
    code = 99
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(tree)
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(dir=tree.parent)
        sys.dont_write_bytecode = True  # a file changed within a second is not told from its bytecode
        sys.path[:0] = [str(tree), str(tree / "plugins" / "builtin")]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        import pytest

        import grpox

        if not Path(grpox.__file__ or "").is_relative_to(tree):
            raise SystemExit(f"not the copy is tested, but {grpox.__file__}")
        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = int(pytest.main([*options, *names], plugins=[Failure(failure)]))
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - whatever the mutant makes of it
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
        os._exit(code)


def copy_tree(folder: Path) -> Path:
    """Copy the files that git knows or would know, as they are now."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard", "--", *COPIED):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed, and the removal not committed
            shutil.copy2(ROOT / name, target)
    return folder


def results(mutants: Sequence[Mutant], part: Path) -> list[dict[str, Any]]:
    """Try those mutants that `part` does not name yet, in `JOBS` processes, and return the results of all."""
    begun = part.read_text().splitlines() if part.exists() else []
    done = {(r["path"], r["line"], r["new"]) for r in map(json.loads, begun)}
    waiting = [each for each in mutants if (each.path, each.line, each.new) not in done]
    contexts = Contexts()
    plans = [(each, contexts.tests(each)) for each in waiting]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    part.touch()
    with tempfile.TemporaryDirectory(prefix="grpox-mutants-") as folder:
        runners = [
            os.fork() or _try(plans[job::JOBS], Path(folder, str(job)), contexts.seconds, part)
            for job in range(JOBS)
        ]
        for pid in runners:
            if os.waitpid(pid, 0)[1]:
                sys.exit("a process that tries mutants has failed; --resume goes on")
    by_place = {(r["path"], r["line"], r["new"]): r for r in map(json.loads, part.read_text().splitlines())}
    return [by_place[each.path, each.line, each.new] for each in mutants]


def _try(
    plans: Sequence[tuple[Mutant, list[list[str]]]], folder: Path, seconds: dict[str, float], part: Path
) -> int:
    """In a child: try mutants, and append a line to `part` for each. Does not return."""
    code = 1
    try:
        runner = Runner(folder, seconds)
        for mutant, batches in plans:
            began = time.monotonic()
            state, test = runner.outcome(mutant, batches)
            line = json.dumps({**asdict(mutant), "state": state, "caught_by": test})
            with part.open("a") as file:
                file.write(f"{line}\n")
            took = time.monotonic() - began
            print(
                f"{state} {mutant.path}:{mutant.line} {mutant.what} {took:.0f} s", file=sys.stderr, flush=True
            )
        code = 0
    finally:
        os._exit(code)


# -- Commands --------------------------------------------------------------------------------------------

STATES = ("caught", "survived", "broken", "endless")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    contexts = commands.add_parser("contexts", help="record which tests execute which line")
    contexts.add_argument("folders", nargs="*", default=["tests"])
    sample = commands.add_parser("sample", help="draw mutants, and try them")
    sample.add_argument("--seed", type=int, required=True)
    sample.add_argument("--count", type=int, default=240)
    again = commands.add_parser("again", help="try the mutants of a sample whose lines still exist")
    again.add_argument("sample", type=Path)
    for command in (sample, again):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--resume", action="store_true", help="go on with a sample that was interrupted")
    line = commands.add_parser("line", help="show what catches changes of a line")
    line.add_argument("place", metavar="FILE:LINE")
    options = parser.parse_args()
    if options.command == "contexts":
        return record_contexts(options.folders)
    if options.command == "line":
        path, _, number = options.place.rpartition(":")
        mutants = [each for each in Mutations(path).found if each.line == int(number) and is_change(each)]
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(results(list(dict.fromkeys(mutants)), Path(folder, "part")), indent=1))
        return None
    if options.command == "sample":
        seed, mutants = options.seed, drawn(options.seed, options.count)
    else:
        before = json.loads(options.sample.read_text())
        seed, mutants = before["seed"], list(still_there(before["mutants"]))
    part = options.out.with_suffix(".part")
    if not options.resume:
        part.unlink(missing_ok=True)
    tried = results(mutants, part)
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for each in tried:
        packages[package_of(each["path"])][each["state"]] += 1
    total = sum(packages.values(), Counter[str]())
    report = {
        "seed": seed,
        "count": len(tried),
        **{state: total[state] for state in STATES},
        "by_package": packages,
        "mutants": tried,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    part.unlink()
    print(json.dumps({name: value for name, value in report.items() if name != "mutants"}))
    return None


if __name__ == "__main__":
    main()
