"""Raises an exception from each line of a component in turn, to see that none is lost within it."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import warnings
from collections.abc import Callable
from logging import Logger, LogRecord
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

DELIBERATE = "noqa: BLE001"
"""A comment in the line of a handler whose author says why it catches everything."""


class Interruption(Exception):
    """An exception that no component expects."""

    is_read = False
    """True once somebody has asked for its text, to report it."""

    def __str__(self) -> str:
        """Return a text, and note that it was read."""
        self.is_read = True
        return "raised by a check of grpox"

    __repr__ = __str__

    @property
    def is_meant(self) -> bool:
        """True if the handler that caught it has the comment `DELIBERATE`."""
        frame = self.__traceback__  # the outermost that it has reached, which has the handler
        lines = linecache.getlines(frame.tb_frame.f_code.co_filename) if frame else []
        return frame is not None and any(
            DELIBERATE in lines[handler.lineno - 1]
            for node in ast.walk(ast.parse("".join(lines)))
            if isinstance(node, ast.Try) and node.lineno <= frame.tb_lineno <= (node.body[-1].end_lineno or 0)
            for handler in node.handlers
        )


def hidden_line(target: Any, exercise: Callable[[], object]) -> str:
    """Return a line of a component, ``file:number``, that may raise without a trace; empty if there is none.

    An exception leaves a trace if `exercise` raises too, or if the component reads it, or logs, on any level,
    or warns of what it does not without an exception. None is needed behind a handler with `DELIBERATE`.

    Args:
        target: a class or function; the lines are those of its file. One without a source file has none.
        exercise: builds and uses the component, in this thread.
    """
    try:
        file = str(inspect.getsourcefile(inspect.unwrap(target)))
        Path(file).read_text(encoding="utf-8")
    except (TypeError, OSError, UnicodeDecodeError):  # built in C, made by exec, encoded otherwise
        return ""
    tried = set[int]()
    usual: set[str] | None = None  # what is said without an exception
    while True:
        line, error, before, records = 0, Interruption(), sys.gettrace(), list[LogRecord]()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal line
            if frame.f_code.co_filename != file:
                return None
            if event == "line" and usual is not None and frame.f_lineno not in tried:  # noqa: B023 - of this turn
                line = frame.f_lineno
                raise error  # noqa: B023
            return trace

        try:
            with (
                warnings.catch_warnings(record=True) as warned,
                patch.object(Logger, "isEnabledFor", lambda *_: True),
                patch.object(Logger, "handle", records.append),
            ):
                warnings.simplefilter("always")
                sys.settrace(trace)
                exercise()
        except Exception:  # noqa: BLE001 - it, or what the component made of it
            error.is_read = True
        finally:
            sys.settrace(before)
        said = {str(each.message) for each in warned} | {str(each.msg) for each in records}
        if usual is None:
            usual = said
            continue
        if not line:
            return ""
        if not (error.is_read or said - usual or error.is_meant):
            return f"{Path(file).name}:{line}"
        tried.add(line)
