"""Golden texts: equal ones pass, others fail with what differs and the cure, and none is without its test."""

from __future__ import annotations

import ast
from pathlib import Path

from support import golden as kept


def test_every_golden_file_belongs_to_a_test() -> None:
    """The name of a file begins with that of a test, which takes the fixture."""
    files = [path for path in kept.FOLDER.rglob("*") if path.is_file()]
    left = [
        str(path)
        for path in files
        if path.name.removesuffix(".txt").split(".")[0].split("-")[0]
        not in takers_of_golden(kept.TESTS / path.parent.relative_to(kept.FOLDER).with_suffix(".py"))
    ]
    assert left == [], "no test reads these any more: remove them"


def takers_of_golden(file: Path) -> set[str]:
    """Return the names of a file's tests that take the fixture."""
    if not file.exists():
        return set()
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and "golden" in {argument.arg for argument in node.args.args}
    }
