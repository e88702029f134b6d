"""Finds names and docstrings in the code that are not plain; docs/contributing.md has the rules.

    python tests/support/plain_words.py            # of all of grpox/ and plugins/
    python tests/support/plain_words.py FILE ...

A function is a verb and a value a noun, so that participles name nothing. A docstring begins with a verb or a
noun.
"""

from __future__ import annotations

import ast
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
"""Words that no docstring begins with."""
PUBLISHED = {"preserve_random_state", "preserve_env"}
"""Names of the plugin API, which stay."""
WRITTEN = {
    "grpox/cli/doctor.py": {"told"},
    "grpox/checkpoint/faults.py": {"found"},
    "grpox/cli/replay.py": {"found"},
}
"""Names that files and JSON have as keys, by the modules that use them."""
_OF_LIBRARIES = re.compile(r"NotFoundError$")
_PARTS = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])")


def problems_of(source: str, allowed: Set[str] = PUBLISHED) -> Iterator[tuple[int, str]]:
    """Yield line and text of each name and docstring of a module that is not plain.

    Args:
        allowed: names that may be as they are.
    """
    for node in ast.walk(ast.parse(source)):
        for name in _names(node):
            for word in PARTICIPLES.keys() & {part.lower() for part in _PARTS.split(name)}:
                if name not in allowed and not _OF_LIBRARIES.search(name):
                    yield (
                        getattr(node, "lineno", 1),
                        f"{name}: '{word}' names nothing; better: {PARTICIPLES[word]}",
                    )
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            opening = re.match(r"\w+", ast.get_docstring(node) or "")
            if opening and opening[0] in OPENINGS:
                line = node.body[0].lineno
                yield line, f"a docstring begins with '{opening[0]}'; better: a verb or a noun"


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
    listed = subprocess.run(
        ["git", "ls-files", "grpox/*.py", "plugins/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [Path(argument) for argument in arguments] or [ROOT / name for name in listed.stdout.splitlines()]
    count = 0
    for file in files:
        written = next((names for name, names in WRITTEN.items() if file == ROOT / name), set())
        for line, problem in sorted(problems_of(file.read_text(encoding="utf-8"), PUBLISHED | written)):
            print(f"{file}:{line}: {problem}")
            count += 1
    if count:
        print(f"{count} found; docs/contributing.md has the rules")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
