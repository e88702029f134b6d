"""Outside the command line nothing is printed: messages are log records, which `grpox.runtime.logs` shows."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRINTERS = {"print", "Console"}
ALLOWED = {
    "grpox/runtime/logs.py": "the handler that shows records on a terminal",
    "grpox/runtime/watchdog.py": "writes a heading into the file of stacks, not on the screen",
    "grpox/observing/display.py": "the live line and the tables of a run, which are no records",
    "grpox/data/prompts.py": "a progress bar",
    "plugins/builtin/grpox_mlflow/commands.py": "commands, whose results they print",
    "plugins/builtin/grpox_vllm_serving/command.py": "a command, whose result it prints",
}


def printers() -> dict[str, list[int]]:
    """Find the calls of print and Console by file."""
    found: dict[str, list[int]] = {}
    for path in sorted([*(ROOT / "grpox").rglob("*.py"), *(ROOT / "plugins" / "builtin").rglob("*.py")]):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("grpox/cli/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _name(node.func) in PRINTERS:
                found.setdefault(name, []).append(node.lineno)
    return found


def _name(function: ast.expr) -> str:
    """Return the name that is called: ``print``, and of ``rich.console.Console`` its last part."""
    if isinstance(function, ast.Attribute):
        return function.attr if function.attr == "Console" else ""
    return function.id if isinstance(function, ast.Name) else ""


def test_nothing_is_printed_but_by_those_that_say_why() -> None:
    found = printers()
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert sorted(found) == sorted(ALLOWED)
