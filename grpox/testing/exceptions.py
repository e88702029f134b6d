"""Finds handlers that catch every exception and go on as if nothing had happened, by reading the source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

EVERYTHING = {"Exception", "BaseException"}
REPORTS = {"warn", "warning", "error", "exception", "critical", "info", "debug", "log", "print"}
REPORTS |= {"log_metric", "log_extra", "warning_once"}
"""Names of functions that report an error."""
DELIBERATE = "noqa: BLE001"
"""A comment in the line of a handler whose author says why it catches everything."""


class Swallow(NamedTuple):
    """A handler that hides every exception."""

    file: str
    line: int
    text: str
    """The handler's first lines."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def swallowing_handlers(target: Any, may_abstain: bool = False) -> Iterator[Swallow]:
    """Yield the handlers in the functions of a component's file that hide every exception.

    A handler hides it that catches `Exception`, `BaseException` or everything, and neither raises, nor reports,
    nor uses the exception. One with the comment ``noqa: BLE001`` is deliberate, as its author says so.

    Args:
        target: a class or function; one without a source file has none.
        may_abstain: a handler whose result is None is right, as of a reward that abstains.
    """
    try:
        name = inspect.getsourcefile(inspect.unwrap(target))
        source = Path(str(name)).read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (
        TypeError,
        OSError,
        SyntaxError,
        UnicodeDecodeError,
    ):  # built in C, made by exec, or encoded otherwise
        return
    lines = source.splitlines()
    inside = {
        id(node): node for function in ast.walk(tree) if _is_function(function) for node in ast.walk(function)
    }
    for node in sorted(inside.values(), key=lambda node: getattr(node, "lineno", 0)):
        if not isinstance(node, ast.ExceptHandler) or not _catches_everything(node):
            continue
        is_deliberate = DELIBERATE in lines[node.lineno - 1]
        if not is_deliberate and not _reports(node) and not (may_abstain and _abstains(node)):
            text = " ".join(ast.unparse(node).split())
            yield Swallow(Path(str(name)).name, node.lineno, text[:80])


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(each, ast.Name) and each.id in EVERYTHING for each in types)


def _reports(handler: ast.ExceptHandler) -> bool:
    for node in (inner for statement in handler.body for inner in ast.walk(statement)):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and node.id == handler.name):
            return True
        if isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            if name in REPORTS:
                return True
    return False


def _abstains(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler returns, appends or assigns None, and no other value."""
    nodes = [inner for statement in handler.body for inner in ast.walk(statement)]
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    has_bare_return = any(isinstance(node, ast.Return) and node.value is None for node in nodes)
    return has_bare_return or (bool(constants) and all(value is None for value in constants))
