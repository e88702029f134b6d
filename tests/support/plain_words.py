"""Finds names and docstrings in the code that are not plain; docs/contributing.md has the rules.

    python tests/support/plain_words.py            # grpox/ and plugins/; elsewhere docstrings alone
    python tests/support/plain_words.py FILE ...

A function is a verb and a value a noun, so that participles name nothing. A docstring begins with a verb or a
noun.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTICIPLES = {
    "told": "message, description",
    "found": "matches, or what it is",
    "made": "result, or what it is",
    "held": "stored, current",
    "kept": "saved, remaining",
    "taken": "used, reserved",
    "asked": "requested, wanted",
}
"""Words that no name has as a part, each with better ones."""
OPENINGS = ("What", "Whether", "Those", "That", "Of", "Which", "Where", "How")
"""Words that no docstring of a module, class, function or attribute begins with."""
PUBLISHED = {"preserve_random_state", "preserve_env"}
"""Names of the plugin API, which stay."""
WRITTEN = {
    "grpox/cli/doctor.py": {"told"},
    "grpox/checkpoint/faults.py": {"found"},
    "grpox/cli/replay.py": {"found"},
}
"""Names that files and JSON have as keys, by the modules that use them."""
_OF_LIBRARIES = re.compile(r"NotFoundError$")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PARTS = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])")


def problems_of(source: str, allowed: Set[str] = PUBLISHED) -> Iterator[tuple[int, str]]:
    """Yield line and text of each name and docstring of a module that is not plain.

    Args:
        allowed: names that may be as they are.
    """
    yield from _name_problems(source, allowed)
    yield from _docstring_problems(source)


def _name_problems(source: str, allowed: Set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        for name in _names(node):
            for word in PARTICIPLES.keys() & {part.lower() for part in _PARTS.split(name)}:
                if name not in allowed and not _OF_LIBRARIES.search(name):
                    line = getattr(node, "lineno", 1)
                    yield line, f"{name}: '{word}' names nothing; better: {PARTICIPLES[word]}"


def _docstring_problems(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        for docstring in _docstrings(node):
            opening = re.match(r"\w+", inspect.cleandoc(str(docstring.value)))
            if opening and opening[0] in OPENINGS:
                yield docstring.lineno, f"a docstring begins with '{opening[0]}'; better: a verb or a noun"


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstring of a module, class or function, and those of the attributes assigned in it."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(node, block, None)
        if not isinstance(statements, list):  # a lambda or a conditional expression has no statements
            continue
        is_documented = block == "body" and isinstance(node, _DOCUMENTED)
        for previous, statement in zip([None, *statements], statements, strict=False):
            match statement:
                case ast.Expr(ast.Constant(value=str()) as text):
                    if isinstance(previous, ast.Assign | ast.AnnAssign) or (previous is None and is_documented):
                        yield text


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.alias(name=name, asname=other):
            return [other or name.rpartition(".")[2]]
    return []


def main(arguments: Sequence[str]) -> int:
    """Print the problems of files and return the exit code."""
    count = 0
    for file in [Path(argument) for argument in arguments] or _listed("grpox", "plugins"):
        written = next((names for name, names in WRITTEN.items() if file == ROOT / name), set())
        count += _print(file, problems_of(file.read_text(encoding="utf-8"), PUBLISHED | written))
    for file in [] if arguments else _listed("benchmarks", "docs", "examples", "requirements", "tests"):
        count += _print(file, _docstring_problems(file.read_text(encoding="utf-8")))
    if count:
        print(f"{count} found; docs/contributing.md has the rules")
    return int(count > 0)


def _listed(*folders: str) -> list[Path]:
    patterns = [f"{folder}/*.py" for folder in folders]
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines()]


def _print(file: Path, problems: Iterator[tuple[int, str]]) -> int:
    ordered = sorted(problems)
    for line, problem in ordered:
        print(f"{file}:{line}: {problem}")
    return len(ordered)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
