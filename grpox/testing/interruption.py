"""Raises an exception from each line of a component in turn, to see that none is lost within it."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from logging import getLogger
from logging.handlers import BufferingHandler
from pathlib import Path
from types import FrameType
from typing import Any

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


def hidden_line(target: Any, exercise: Callable[[], object]) -> str:
    """Return a line of a component, ``file:number``, that may raise without a trace; empty if there is none.

    An exception leaves a trace if `exercise` raises too, or if the component logs, warns of or reads it.

    Args:
        target: a class or function; the lines are those of its file. One without a source file, or with
            `DELIBERATE` behind a handler, has none.
        exercise: builds and uses the component, in this thread.
    """
    try:
        file = str(inspect.getsourcefile(inspect.unwrap(target)))
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (TypeError, OSError, UnicodeDecodeError):  # built in C, made by exec, encoded otherwise
        return ""
    if any(DELIBERATE in line and line.lstrip().startswith("except") for line in lines):
        return ""
    tried = {0}
    while True:
        line, error, before, log = 0, Interruption(), sys.gettrace(), BufferingHandler(1000)

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal line
            if frame.f_code.co_filename != file:
                return None
            if event == "line" and frame.f_lineno not in tried:
                line = frame.f_lineno
                raise error  # noqa: B023 - of this turn, in which alone it is called
            return trace

        getLogger().addHandler(log)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                sys.settrace(trace)
                exercise()
        except Exception:  # noqa: BLE001 - it, or what the component made of it
            error.is_read = True
        finally:
            sys.settrace(before)
            getLogger().removeHandler(log)
        if line in tried:
            return ""
        if not (error.is_read or warned or log.buffer):
            return f"{Path(file).name}:{line}"
        tried.add(line)
