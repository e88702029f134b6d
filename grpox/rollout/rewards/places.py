"""Where in the user's own code a reward function raised, or hangs: ``rewards.py:12``."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

OWN_FOLDER = Path(__file__).parent


def raised_at(error: BaseException, function: Callable[..., Any]) -> str:
    """The line of the user's function from which `error` came, or where the function begins."""
    return _first_of_user(traceback.extract_tb(error.__traceback__)) or defined_at(function)


def hanging_at(thread: int | None, function: Callable[..., Any]) -> str:
    """The line of the user's function that the thread of this id is at, or where the function begins."""
    frame = sys._current_frames().get(thread or 0)
    return (_first_of_user(traceback.extract_stack(frame)) if frame else "") or defined_at(function)


def dumped_at(stack: str) -> str:
    """The line of the user's function in what `faulthandler` wrote; empty where it tells none."""
    found = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.MULTILINE)
    frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(found)]
    awaits = any(Path(frame.filename).name == "background_loop.py" for frame in frames)
    return "" if awaits else _first_of_user(frames)


def defined_at(function: Callable[..., Any]) -> str:
    """The file and line of a function, or of the call method of an object; empty where Python knows none."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(
        type(function).__call__, "__code__", None
    )
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""


def _first_of_user(frames: Iterable[traceback.FrameSummary]) -> str:
    """The first frame that this package called; the caller of this package is none."""
    inside = False
    for frame in frames:
        own = Path(frame.filename).parent == OWN_FOLDER
        if inside and not own:
            return f"{Path(frame.filename).name}:{frame.lineno}"
        inside = inside or own
    return ""
