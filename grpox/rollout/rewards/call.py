"""One call of a reward function: its arguments, the line at which it fails, and the check of its scores.

All coroutines share one event loop for the life of the process, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import re
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

from grpox.contracts import FLOAT32_MAX, FailedScore, finite_number
from grpox.data.reward_signature import Signature
from grpox.errors import TEXT, brief, shorten, text_of
from grpox.runtime.foreign_code import copied
from grpox.runtime.signals import raise_if_signal


class CallFailed(Exception):
    """Raised for a call without scores; the text continues a message after the reward's name.

    The cause is the exception that the function raised, if it raised one.
    """


def called(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    count: int,
    lengths: Sequence[int] | None = None,
    settle: Callable[[Awaitable[Any]], Any] | None = None,
    signature: Signature | None = None,
) -> tuple[CheckedScores, CallLog]:
    """Call `function` with the `arguments` that it takes, for `count` completions, and check its result.

    Args:
        lengths: length of the list that the function returns for each completion; None: it returns numbers.
        settle: waits for the end of a coroutine and returns its value; default: in the background loop.
        signature: the function's signature, if it is known.

    Raises:
        CallFailed: it raised, or returned or logged something invalid.
    """
    log = CallLog()
    arguments = {**arguments, "log_metric": log.metric, "log_extra": log.extra}
    try:
        returned = function(**accepted(signature or Signature.of(function), arguments))
        if inspect.isawaitable(returned):
            returned = settle(returned) if settle else BackgroundCall(awaited(returned)).result()
        scores = checked_scores(returned, count, lengths)
        log.check(count)
    except CallFailed:
        raise
    except BaseException as error:
        raise_if_signal(error)
        raise failure_by(error, function, arguments) from error
    return scores, log


def failure_by(error: BaseException, function: Callable[..., Any], arguments: Mapping[str, Any]) -> CallFailed:
    """Return an exception of a function as its failure."""
    text, completions = text_of(error), arguments.get("completions")
    hint = ""
    # The function reads a string as if it were messages, by ``[0]["content"]`` or ``.get``.
    if completions and isinstance(completions[0], str) and re.search(r"^string ind|^'str' object", text):
        hint = (
            "; completions are strings here, as the prompts are: read completion, not completion[0]['content']"
        )
    message = f"{type(error).__name__}: {text}".removesuffix(": ")
    return CallFailed(f"raised {message}{placed(raised_at(error, function))}{hint}")


class BackgroundCall:
    """A coroutine at work in the background loop, from the moment this is built.

    The loop outlives the call, because clients that users create once (aiohttp, httpx, openai) hold
    connections that belong to the loop of their first use.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._loop = _background_loop()
        self._task: Future[asyncio.Task[Any]] = Future()
        # In a copy of this thread's context.
        self._loop.call_soon_threadsafe(lambda: self._task.set_result(self._loop.create_task(work)))
        self._ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> asyncio.Task[Any]:
        await asyncio.wait([self._task.result()])
        return self._task.result()

    def result(self) -> Any:
        """Wait for the end and return the result; also where the caller's own loop is running.

        Raises:
            asyncio.CancelledError: `cancel` stopped it.
        """
        return self._ended.result().result()

    def cancel(self) -> None:
        """Ask the coroutine to stop; `result` returns when it has."""
        self._loop.call_soon_threadsafe(lambda: self._task.result().cancel())


@functools.cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_serve, args=(loop,), name="grpox-async-rewards", daemon=True).start()
    return loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # asyncio raises these two from run_forever, and also where the task is awaited.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


async def awaited(returned: Awaitable[Any], device: int | None = None) -> Any:
    """Wait for the coroutine that a function returned, with the device of the function's caller."""
    use_device(device)
    return await returned


def placed(at: str) -> str:
    """Return a place for the end of a message."""
    return f" ({at})" if at else ""


def current_device() -> int | None:
    """The index of this thread's device; None without CUDA, or where nothing has imported torch."""
    torch = sys.modules.get("torch")  # where nobody has imported it, nobody has chosen a device
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else None


def use_device(index: int | None) -> None:
    """Use the device that `current_device` returned in another thread."""
    if index is not None:
        sys.modules["torch"].cuda.set_device(index)


OWN_FOLDERS = {Path(__file__).parent, Path(raise_if_signal.__code__.co_filename).parent}
"""Folders of grpox's own code, whose lines no message names."""


def raised_at(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the line of the user's function that raised `error`, or the line where the function begins."""
    return _first_of_user(traceback.extract_tb(error.__traceback__)) or defined_at(function)


def hanging_at(thread: int | None, function: Callable[..., Any]) -> str:
    """Return the line that a thread executes in the user's function, or the line where the function begins."""
    frame = sys._current_frames().get(thread or 0)
    return (_first_of_user(traceback.extract_stack(frame)) if frame else "") or defined_at(function)


def dumped_at(stack: str) -> str:
    """The line of the user's function in the text that `faulthandler` wrote; empty if it has none."""
    matches = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.MULTILINE)
    frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(matches)]
    awaits = any(frame.name == "result" and frame.filename == __file__ for frame in frames)
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
        own = Path(frame.filename).parent in OWN_FOLDERS
        if inside and not own:
            return f"{Path(frame.filename).name}:{frame.lineno}"
        inside = inside or own
    return ""


def accepted(signature: Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Select the `arguments` that a function takes: all with ``**kwargs``, else those it names."""
    names = signature.names
    return {name: value for name, value in arguments.items() if names is None or name in names}


@dataclass(frozen=True)
class CheckedScores:
    """The scores of N completions, and the reasons for refused values."""

    values: list[float | None]
    """[N]; None where the function abstained or returned no score."""
    refused: dict[int, str] = field(default_factory=dict)
    """Index of a completion -> why its value is no score."""
    lists: list[list[float] | None] | None = None
    """[N]; the lists whose sums are `values`, None where the value is None; None: there are no lists."""


def checked_scores(returned: Any, count: int, lengths: Sequence[int] | None = None) -> CheckedScores:
    """Return `returned` as `count` floats or None; numpy and torch scalars are converted.

    Args:
        lengths: N lengths of the completions' lists, whose sums are the scores; None: one number each.

    Raises:
        CallFailed: it is no list of that length; the message says what it is.
    """
    # A string, mapping or set iterates too, but not in the order of the completions.
    is_list = isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping | Set)
    if not is_list or getattr(returned, "shape", None) == ():  # an array or tensor without dimensions
        raise CallFailed(f"returned {_described(returned)}, not a list of {count} numbers")
    listed = list(returned)
    if len(listed) != count:
        raise CallFailed(f"returned {len(listed)} scores for {count} completions")
    checked = CheckedScores([None] * count, lists=None if lengths is None else [None] * count)
    for index, score in enumerate(listed):
        if isinstance(score, FailedScore):
            checked.refused[index] = f"has no score for completion {index}: {shorten(score.reason, TEXT)}"
        elif score is not None and checked.lists is not None and lengths is not None:
            try:
                checked.values[index], checked.lists[index] = _list_score(score, lengths[index])
            except ValueError as error:
                wanted = f"a list of {lengths[index]} finite float32 or None, as its attribute per says"
                what = str(error) or _described(score)
                checked.refused[index] = f"returned {what} for completion {index}; wanted is {wanted}"
        elif score is not None:
            number = score if type(score) is float else finite_number(score)
            if number is not None and abs(number) <= FLOAT32_MAX:  # NaN is not
                checked.values[index] = number
                continue
            hint = " (None abstains)" if isinstance(score, SupportsFloat) else ""
            if isinstance(score, list | tuple):
                hint = "; a function that returns lists says so by its attribute per (token, turn or separator)"
            what = f"returned {_described(score)} for completion {index}; a score is a finite float32 or None"
            checked.refused[index] = what + hint
    return checked


def _list_score(score: Any, length: int) -> tuple[float, list[float]]:
    """Return the sum and the numbers of a list; raises ValueError, with the number of another length."""
    try:
        values = [finite_number(value) for value in score] if not isinstance(score, str | Mapping) else None
    except TypeError:  # a number, or an array without dimensions
        values = None
    if values is not None and len(values) != length:
        raise ValueError(f"{len(values)} numbers")
    numbers = [value for value in values or () if value is not None and abs(value) <= FLOAT32_MAX]
    total = math.fsum(numbers)
    if values is None or len(numbers) < length or abs(total) > FLOAT32_MAX:
        raise ValueError
    return total, numbers


@dataclass
class CallLog:
    """Values that one call of a reward function logs through `log_metric` and `log_extra`."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        """``log_metric(name, value)``; raises ValueError for what is no finite number."""
        number = finite_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}, {value!r}): a metric is a finite number")
        self.metrics.setdefault(str(name), []).append(number)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """``log_extra(column, values)``; several calls for one column append. Values are copied."""
        self.columns.setdefault(str(column), []).extend(copied(list(values)))

    def check(self, count: int) -> None:
        """Raises CallFailed unless every column has a value for each of `count` completions."""
        for name, values in self.columns.items():
            if len(values) != count:
                raise CallFailed(
                    f"logged {len(values)} values of log_extra column '{name}' for {count} completions"
                )


def _described(value: Any) -> str:
    text = brief(value, TEXT)
    return (
        text if value is None else f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
    )
