"""Calls of a component's code and of other code not grpox's own: an error names kind, name and line."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from grpox.errors import GrpoxError, RunFailed, describe, left_by_rich
from grpox.runtime.signals import raise_if_signal

if TYPE_CHECKING:
    from torch import Tensor

_UNCHANGING = {str, int, float, bool, bytes, NoneType}
FOREIGN = "code that the run calls"
"""Names what has raised where nobody nearer to it has."""


def call(kind: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call `method` of a component with `arguments`.

    Raises:
        RunFailed: it raised, be it SystemExit or a KeyboardInterrupt of its own.
    """
    try:
        return method(*arguments)
    except GrpoxError:
        raise
    except BaseException as error:
        raise_if_signal(error)
        # The first frame is the call above; the second is the component itself.
        frames = traceback.extract_tb(error.__traceback__)[1:2]
        raise RunFailed(f"{kind} '{name_of(method)}' {_raised(error, frames)}") from error


@contextmanager
def translate_exits(what: str) -> Iterator[None]:
    """Raise RunFailed in this block for SystemExit, a KeyboardInterrupt that no signal raised, and the like.

    They would end the process as if all were well, or as if the user had ended it. An Exception passes
    unchanged: its type tells lack of memory and a lost rank apart.

    Args:
        what: names the code that raised them.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise_if_signal(error)
        if left_by_rich(error):
            raise
        raise RunFailed(f"{what} {_raised(error, traceback.extract_tb(error.__traceback__)[-1:])}") from error


@contextmanager
def unchanged(kind: str, method: Callable[..., Any], tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Check that what is called in this block changes none of `tensors` in place: others go on with them.

    Copies of them would cost memory in every micro-batch; their version counters cost nothing. A change behind
    these, through `.data` or numpy, is not seen.

    Raises:
        RunFailed: one was changed.
    """
    before = {name: _version(tensor) for name, tensor in tensors.items()}
    yield
    changed = [name for name, tensor in tensors.items() if _version(tensor) != before[name]]
    if changed:
        raise RunFailed(
            f"{kind} '{name_of(method)}' changes {', '.join(changed)} in place, which others are given too: "
            "it has to leave its arguments as they are, and work on copies (clone)"
        )


def name_of(method: Callable[..., Any]) -> str:
    """The name of the component that `method` belongs to."""
    return type(getattr(method, "__self__", method)).__name__


def _raised(error: BaseException, frames: Iterable[traceback.FrameSummary]) -> str:
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
    return f"raised {describe(error)}{where}"


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def copied(value: Any) -> Any:
    """Return a deep copy; what Python cannot copy is shared, in a list each such value by itself."""
    if type(value) is list and not set(map(type, value)) <= _UNCHANGING:
        return [_copied_if_possible(each) for each in value]
    return _copied_if_possible(value)


def _copied_if_possible(value: Any) -> Any:
    try:
        return _copied(value)
    except RecursionError:  # it contains itself, which only copy.deepcopy can copy, or is nested too deeply
        return _copied_by_python(value)


def _copied(value: Any) -> Any:
    """Copy deeply, and a list of many numbers or texts at once, as copy.deepcopy does not."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is list:
        return value.copy() if set(map(type, value)) <= _UNCHANGING else [_copied(each) for each in value]
    if kind is tuple:
        return value if set(map(type, value)) <= _UNCHANGING else tuple(map(_copied, value))
    if kind is dict:
        return {name: _copied(each) for name, each in value.items()}
    return _copied_by_python(value)


def _copied_by_python(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except BaseException as error:  # noqa: BLE001 - a lock, a connection: what has no copy is shared, as documented
        raise_if_signal(error)
        return value
