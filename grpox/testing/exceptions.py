"""Finds handlers that catch every exception and go on as if nothing had happened, by reading the source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
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
        file = Path(str(inspect.getsourcefile(inspect.unwrap(target))))
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (TypeError, OSError, SyntaxError, UnicodeDecodeError):  # built in C, made by exec, encoded otherwise
        return
    lines = source.splitlines()
    functions = _nodes([tree], ast.FunctionDef | ast.AsyncFunctionDef)
    for handler in sorted({*_nodes(functions, ast.ExceptHandler)}, key=lambda node: node.lineno):
        is_deliberate = DELIBERATE in lines[handler.lineno - 1] or not _catches_everything(handler)
        if not is_deliberate and not _reports(handler) and not (may_abstain and _abstains(handler)):
            text = " ".join(ast.unparse(handler).split())
            yield Swallow(file.name, handler.lineno, text[:80])


def _nodes(roots: Iterable[ast.AST], kind: Any) -> list[Any]:
    return [node for root in roots for node in ast.walk(root) if isinstance(node, kind)]


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(each, ast.Name) and each.id in EVERYTHING for each in types)


def _reports(handler: ast.ExceptHandler) -> bool:
    functions = (call.func for call in _nodes(handler.body, ast.Call))
    names = {getattr(each, "attr", getattr(each, "id", "")) for each in functions}
    uses = any(name.id == handler.name for name in _nodes(handler.body, ast.Name))
    return uses or bool(names & REPORTS or _nodes(handler.body, ast.Raise))


def _abstains(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler returns, appends or assigns None, and no other value."""
    constants = [constant.value for constant in _nodes(handler.body, ast.Constant)]
    has_bare_return = any(each.value is None for each in _nodes(handler.body, ast.Return))
    return has_bare_return or (bool(constants) and all(value is None for value in constants))
