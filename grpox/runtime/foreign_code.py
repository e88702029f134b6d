"""Calls of code outside grpox, such as a component's: errors name the component's kind, name and line."""

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
"""Default name, in messages, of the code that raised."""


def call(kind: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call `method` of a component with `arguments`.

    Raises:
        RunFailed: the method raised any exception, including SystemExit or its own KeyboardInterrupt.
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
    """Turn SystemExit, and a KeyboardInterrupt that no signal raised, into RunFailed within this block.

    Otherwise they would end the process as if it had succeeded, or as if the user had ended it. An Exception
    passes unchanged, because its type distinguishes lack of memory from a lost rank.

    Args:
        what: name of the code in messages.
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
    """Check that code called in this block changes none of `tensors` in place, because others also use them.

    The check compares version counters; copies would cost memory in every micro-batch. A change through `.data`
    or numpy is not detected.

    Raises:
        RunFailed: a tensor was changed.
    """
    versions: list[tuple[str, Tensor, int]] = []
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_inference():
            versions.append((name, tensor, tensor._version))
    yield
    changed = [name for name, tensor, version in versions if tensor._version != version]
    if changed:
        raise RunFailed(
            f"{kind} '{name_of(method)}' must not change {', '.join(changed)} in place: work on copies "
            "(clone), because other components use the same tensors"
        )


def name_of(method: Callable[..., Any]) -> str:
    """Return the name of the component of `method`."""
    return type(getattr(method, "__self__", method)).__name__


def _raised(error: BaseException, frames: Iterable[traceback.FrameSummary]) -> str:
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
    return f"raised {describe(error)}{where}"


def copied(value: Any) -> Any:
    """Return a deep copy; values that Python cannot copy are shared, in a list one by one."""
    try:
        return _copied(value)
    except RecursionError:  # a value that contains itself, which only copy.deepcopy can copy, or deep nesting
        return [_copied_by_python(each) for each in value] if type(value) is list else _copied_by_python(value)


def _copied(value: Any) -> Any:
    """Copy deeply; faster than copy.deepcopy for many numbers or texts."""
    kind = type(value)
    if kind not in (dict, list, tuple):
        return value if kind in _UNCHANGING else _copied_by_python(value)
    parts = value.values() if kind is dict else value
    if set(map(type, parts)) <= _UNCHANGING:
        return value if kind is tuple else value.copy()
    own = []
    for each in parts:
        own.append(each if type(each) in _UNCHANGING else _copied(each))
    return dict(zip(value, own, strict=True)) if kind is dict else kind(own)


def _copied_by_python(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except BaseException as error:  # noqa: BLE001 - a value without a copy, such as a lock, is shared, as documented
        raise_if_signal(error)
        return value
