"""Breaks the core in places drawn by a seed, one after the other, and tells which of them no test sees.

    python tests/support/mutants.py --seed 1 --count 30 [--list] [--jobs 1] [--only grpox/update/packing.py]

A mutant is one small change of one file: a comparison flipped, a constant off by one, a statement dropped. It
is made in a copy of the tree, where the tests of that file run until the first fails: the mutant is caught. One
that does not import is broken and one that loops for ever is endless, both as good as caught. If all tests
pass it has survived, and is shown. Libraries are imported once; each mutant is tried in a fork that imports
grpox from the copy.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import gc
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("grpox", "plugins", "tests", "pyproject.toml")
UNIT = "tests/unit"
GRADIENTS = tuple(f"test_step_gradient_{name}.py" for name in ("by_hand", "terms_by_hand", "invariance"))
SAMPLING = (
    "test_sampler.py",
    "test_prefetch.py",
    "test_dynamic_sampling.py",
    "test_evaluator.py",
    "test_streaming_scorer.py",
)
TESTS: dict[str, tuple[str, ...]] = {
    "grpox/update/objective.py": ("test_objective.py", "test_step_loss.py", "test_mismatch.py", *GRADIENTS),
    "grpox/update/packing.py": ("test_packing_budget.py", "test_packing.py", "test_reduction.py", *GRADIENTS),
    "grpox/rollout/sampler.py": SAMPLING,
    "grpox/rollout/collector.py": SAMPLING,
    "grpox/checkpoint/resume.py": ("test_checkpoint_resume.py",),
    "grpox/checkpoint/folders.py": (
        "test_manifest.py",
        "test_checkpoint_files.py",
        "test_checkpoint_resume.py",
    ),
}
"""The tests of each file, quickest first."""
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
SURVIVED = "survived"


@cache
def original(path: str) -> str:
    """The text of a file, as it was when this was first asked for."""
    return (ROOT / path).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    line: int
    what: str
    source: str
    """The file with the change."""

    def diff(self) -> str:
        old = original(self.path).splitlines()
        lines = difflib.unified_diff(old, self.source.splitlines(), n=0, lineterm="")
        return "\n".join(f"    {line}" for line in lines if not line.startswith(("---", "+++", "@@")))


class Mutations(ast.NodeVisitor):
    """Every mutant of a file, in the order of its nodes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.text = original(path)
        self.lines = self.text.encode().splitlines(keepends=True)
        self.found: list[Mutant] = []
        self.in_message = 0
        self.visit(ast.parse(self.text))

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
        """Add the mutant in which `text` stands in the place of `node`, unless it is no Python."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        before = b"".join(self.lines[:first]) + self.lines[first][: node.col_offset]
        after = self.lines[last][node.end_col_offset :] + b"".join(self.lines[last + 1 :])
        source = (before + text.encode() + after).decode()
        with contextlib.suppress(SyntaxError):
            if ast.dump(ast.parse(source)) != ast.dump(ast.parse(self.text)):
                self.found.append(Mutant(self.path, node.lineno, what, source))


def _off_by_one(bound: ast.expr | None, none: str) -> Iterator[ast.expr]:
    if bound is None:
        yield ast.parse(none, mode="eval").body
        return
    for operator in (ast.Add(), ast.Sub()):
        yield ast.BinOp(bound, operator, ast.Constant(1))


def mutants_of(paths: Sequence[str]) -> list[Mutant]:
    """All mutants of some files, no two of them the same."""
    found = [mutant for path in paths for mutant in Mutations(path).found]
    return list({(mutant.path, mutant.source): mutant for mutant in found}.values())


def copy_tree(folder: Path) -> Path:
    """Copy the files that git knows or would know, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *COPIED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed, and the removal not committed
            shutil.copy2(ROOT / name, target)
    return folder


def tests_of(path: str, tree: Path) -> list[str]:
    names = sorted(str(file.relative_to(tree)) for file in (tree / UNIT).rglob("test_*.py"))
    return [name for name in names if Path(name).name in TESTS[path]]


@dataclass
class Trial:
    """The tests of one file in a copy of the tree, in a fork of this process."""

    tree: Path
    path: str
    limit: float
    """Seconds after which the tests are taken to loop for ever."""

    def __post_init__(self) -> None:
        self.log = self.tree.with_suffix(".log")
        self.began = time.monotonic()
        self.seconds = 0.0
        self.pid = os.fork()
        if self.pid == 0:
            _test(self.tree, self.path, self.log)

    def ended(self) -> str | None:
        """SURVIVED and so on; None: it is still running."""
        self.seconds = time.monotonic() - self.began
        if self.seconds > self.limit:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return "endless"
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done:
            return None
        code = os.waitstatus_to_exitcode(status)
        return SURVIVED if code == 0 else "caught" if code == 1 else "broken"

    def wait(self) -> str:
        while (state := self.ended()) is None:
            time.sleep(0.02)
        return state


def _test(tree: Path, path: str, log: Path) -> None:
    """In the child: run the tests of the copy and leave with their exit code. Does not return."""
    code = 99
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(tree)
        os.environ["TMPDIR"] = tempfile.tempdir = str(tree.parent)  # what a killed child leaves goes with it
        sys.dont_write_bytecode = True  # a file changed within a second is not told from its bytecode
        sys.path[:0] = [str(tree), str(tree / "plugins" / "builtin")]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        import pytest

        import grpox

        if not Path(grpox.__file__ or "").is_relative_to(tree):
            raise SystemExit(f"not the copy is tested, but {grpox.__file__}")
        arguments = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = int(pytest.main([*arguments, *tests_of(path, tree)]))
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - whatever the mutant makes of it
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30, help="how many mutants to draw; 0: all there are")
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at once")
    parser.add_argument("--list", action="store_true", help="show the mutants drawn, and try none")
    parser.add_argument("--only", action="append", choices=list(TESTS), help="draw from this file")
    options = parser.parse_args()
    drawn = mutants_of(options.only or list(TESTS))
    if options.count:
        drawn = random.Random(options.seed).sample(drawn, min(options.count, len(drawn)))
    if options.list:
        for number, mutant in enumerate(drawn, start=1):
            print(f"{number}. {mutant.path}:{mutant.line} {mutant.what}\n{mutant.diff()}")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    with tempfile.TemporaryDirectory(prefix="grpox-mutants-") as folder:
        return _report(drawn, Path(folder), options.jobs)


def _report(drawn: Sequence[Mutant], folder: Path, jobs: int) -> int:
    """Try the mutants and tell of those that survive: 1 if any does, 2 if the tests fail without one."""
    free = [copy_tree(folder / f"tree-{number}") for number in range(jobs)]
    limits = {}
    for path in dict.fromkeys(mutant.path for mutant in drawn):
        trial = Trial(free[0], path, 600)
        if trial.wait() != SURVIVED:
            print(f"the tests of {path} fail without a mutant:\n{trial.log.read_text()[-3000:]}")
            return 2
        limits[path] = 30 + 5 * trial.seconds * jobs
        print(f"{path}: its tests take {trial.seconds:.1f} s", flush=True)
    waiting, states = list(enumerate(drawn, start=1)), Counter[str]()
    running: list[tuple[int, Mutant, Trial]] = []
    while waiting or running:
        if waiting and free:
            number, mutant = waiting.pop(0)
            tree = free.pop()
            (tree / mutant.path).write_text(mutant.source, encoding="utf-8")
            running.append((number, mutant, Trial(tree, mutant.path, limits[mutant.path])))
        for each in [*running]:
            number, mutant, trial = each
            if (state := trial.ended()) is None:
                continue
            running.remove(each)
            (trial.tree / mutant.path).write_text(original(mutant.path), encoding="utf-8")
            free.append(trial.tree)
            states[state] += 1
            told = f"\n{mutant.diff()}" if state == SURVIVED else ""
            print(f"{number}. {state}: {mutant.path}:{mutant.line} {mutant.what}{told}", flush=True)
        time.sleep(0.02)
    told = ", ".join(f"{count} {state}" for state, count in states.most_common())
    print(f"of {len(drawn)} mutants: {told}")
    return 1 if states[SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
