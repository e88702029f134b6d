"""A call of a component during a run: what it raises is told with its kind, its name and the line."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpox.errors import GrpoxError, RunFailed, describe


def call(kind: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """`method` of a component called with `arguments`.

    Raises:
        RunFailed: it raised.
    """
    try:
        return method(*arguments)
    except GrpoxError:
        raise
    except Exception as error:
        # The first frame is the call above; the second is the component itself.
        frames = traceback.extract_tb(error.__traceback__)[1:2]
        where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
        told = describe(error)
        raise RunFailed(f"{kind} '{name_of(method)}' raised {told}{where}") from error


def name_of(method: Callable[..., Any]) -> str:
    """The name of the component that `method` belongs to."""
    return type(getattr(method, "__self__", method)).__name__
