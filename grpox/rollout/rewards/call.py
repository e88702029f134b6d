"""One call of a reward function, in a daemon thread of its own.

Python cannot kill a thread. A daemon thread that hangs holds up neither the run, which stops waiting for it,
nor the end of the process.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import re
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

from grpox.contracts import FLOAT32_MAX, FailedScore, finite_number
from grpox.data.reward_signature import Signature
from grpox.errors import TEXT, brief, chain, shorten, text_of
from grpox.rollout.rewards.background_loop import BackgroundCall
from grpox.runtime.foreign_code import copied
from grpox.runtime.signals import raise_if_signal

ByName = Mapping[str, Sequence[Any]]
"""Argument -> N values: facts about episodes, by the names `EPISODE_ARGUMENTS`."""
CANCEL_SECONDS = 1.0
"""Seconds to wait for a cancelled coroutine; one that continues after that counts as hanging."""


class RewardCall:
    """A call of `function` with those of `arguments` it takes, for `count` completions.

    Once it has ended, either `scores` is set, or `failure` says what went wrong, and `error` is the exception
    where the function raised.

    Args:
        lengths: of the list that the function returns for each completion; None: it returns one number each.
        signature: of the function, if it is known.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        count: int,
        lengths: Sequence[int] | None = None,
        signature: Signature | None = None,
    ) -> None:
        self.function = function
        self._signature = signature or Signature.of(function)
        self.log = CallLog()
        self.scores: CheckedScores | None = None
        self.failure = ""
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._arguments = {**arguments, "log_metric": self.log.metric, "log_extra": self.log.extra}
        self._count, self._lengths = count, lengths
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._abandoned = False
        self._awaited: BackgroundCall[_Awaited] | None = None
        self._device = current_device()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self.run), name="grpox-reward", daemon=True)
        self._started = time.perf_counter()

    def start(self) -> None:
        """Start the call in its thread."""
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Wait until `timeout` seconds after the start; abandon a call that has not ended, and return False."""
        # Not join: where an interrupt ends it, Python 3.11 holds the thread for ended.
        if not self._ended.wait(max(0.0, self._started + timeout - time.perf_counter())):
            self.seconds = time.perf_counter() - self._started
            at = hanging_at(None if self._awaited else self._thread.ident, self.function)
            self.failure = f"took longer than its timeout of {timeout:g} s{_placed(at)}"
            self.abandon()
            return False
        return True

    def abandon(self) -> None:
        """Stop what can be stopped: a coroutine is cancelled, a thread stays until its function returns."""
        with self._lock:
            self._abandoned = True
        if self._awaited is not None and self.running:
            self._awaited.cancel()
            self._ended.wait(CANCEL_SECONDS)

    @property
    def running(self) -> bool:
        """True while the function has not returned."""
        return not self._ended.is_set()

    def run(self) -> None:
        """Call the function in the current thread, wait for it and check what it returned."""
        try:
            use_device(self._device)
            returned = self.function(**accepted(self._signature, self._arguments))
            if inspect.isawaitable(returned):
                returned = self._await(returned)
            scores = checked_scores(returned, self._count, self._lengths)
            self.log.check(self._count)
            if not self._abandoned:
                self.scores = scores
        except BadScores as error:
            self._fail(str(error), None)
        except BaseException as error:  # noqa: BLE001 - SystemExit too, which in a thread ends nothing
            raise_if_signal(error)
            self.fail_by(error)
        finally:
            self.seconds = self.seconds or time.perf_counter() - self._started
            self._ended.set()

    def fail_by(self, error: BaseException) -> None:
        """Count an exception as the function's own failure."""
        message = f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
        hint = _form_hint(error, self._arguments.get("completions"))
        self._fail(f"raised {message}{_placed(raised_at(error, self.function))}{hint}", error)

    def needs_main_thread(self) -> bool:
        """Tell whether a plain function failed by setting a signal handler, as math-verify's limit does."""
        if self.error is None or self._awaited is not None:
            return False
        return any("signal only works in main thread" in text_of(error) for error in chain(self.error))

    def _await(self, returned: Awaitable[Any]) -> Any:
        try:
            with self._lock:
                if self._abandoned:
                    raise asyncio.CancelledError
                self._awaited = BackgroundCall(_awaited(returned, self._device))
            value, error = self._awaited.result()
        except asyncio.CancelledError:
            if inspect.iscoroutine(returned):  # it never began: else the cancellation was raised in it
                returned.close()
            raise
        if error is not None:
            raise error
        return value

    def _fail(self, failure: str, error: BaseException | None) -> None:
        if not self._abandoned:  # else it failed by its timeout, whatever it does later
            self.failure, self.error = failure, error


_Awaited = tuple[Any, BaseException | None]


async def _awaited(returned: Awaitable[Any], device: int | None) -> _Awaited:
    """The value or the exception; asyncio would let SystemExit out of the loop."""
    use_device(device)
    try:
        return await returned, None
    except BaseException as error:  # noqa: BLE001 - told
        return None, error


def _form_hint(error: BaseException, completions: Any) -> str:
    """Explain the failure of a function that takes a text for messages, by ``[0]["content"]`` or ``.get``."""
    is_text = bool(completions) and isinstance(completions[0], str)
    if is_text and re.search(r"^string ind|^'str' object", text_of(error)):
        return (
            "; completions are strings here, as the prompts are: read completion, not completion[0]['content']"
        )
    return ""


def _placed(at: str) -> str:
    return f" ({at})" if at else ""


def current_device() -> int | None:
    """The index of this thread's device; None without CUDA, or where nothing has imported torch."""
    torch = sys.modules.get("torch")  # where nobody has imported it, nobody has chosen a device
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else None


def use_device(index: int | None) -> None:
    """Make what `current_device` told in another thread the device of this one."""
    if index is not None:
        sys.modules["torch"].cuda.set_device(index)


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
    matches = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.MULTILINE)
    frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(matches)]
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


def accepted(signature: Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Select the `arguments` that a function takes: all with ``**kwargs``, else those it names."""
    names = signature.names
    return {name: value for name, value in arguments.items() if names is None or name in names}


def own_copies(signature: Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `arguments` that a function takes; their lists, rows and other values are deep copies.

    An object that Python cannot copy, and `trainer_state`, are shared.
    """
    return {
        name: value if name == "trainer_state" else copied(value)
        for name, value in accepted(signature, arguments).items()
    }


class BadScores(Exception):
    """A reward function returned something else than one value per completion."""


@dataclass(frozen=True)
class CheckedScores:
    """The scores of N completions, and what is wrong with those that are no scores."""

    values: list[float | None]
    """[N]; None where the function abstained or returned no score."""
    refused: dict[int, str] = field(default_factory=dict)
    """Index of a completion -> why its value is no score."""
    lists: list[list[float] | None] | None = None
    """[N]; the numbers of which each value is the sum, None where that is None; None: there are no lists."""


def checked_scores(returned: Any, count: int, lengths: Sequence[int] | None = None) -> CheckedScores:
    """`returned` as `count` floats or None; numpy and torch scalars are converted.

    Args:
        lengths: N, of a list for each completion, whose sum is its score; None: a number each.

    Raises:
        BadScores: it is no list of that length; the message says what it is.
    """
    # A string, mapping or set iterates too, but not in the order of the completions.
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping | Set):
        raise BadScores(f"returned {_described(returned)}, not a list of {count} numbers")
    try:
        scores = iter(returned)
    except TypeError as error:  # an array or tensor without dimensions
        raise BadScores(f"returned {_described(returned)}, not a list of {count} numbers") from error
    listed = list(scores)
    if len(listed) != count:
        raise BadScores(f"returned {len(listed)} scores for {count} completions")
    if lengths is not None:
        return _checked_lists(listed, lengths)
    checked = CheckedScores([None] * count)
    for index, score in enumerate(listed):
        number = finite_number(score)
        if number is not None and abs(number) > FLOAT32_MAX:
            number = None
        checked.values[index] = number
        if isinstance(score, FailedScore):
            checked.refused[index] = f"has no score for completion {index}: {shorten(score.reason, TEXT)}"
            continue
        if number is None and score is not None:
            hint = " (None abstains)" if isinstance(score, SupportsFloat) else ""
            if isinstance(score, list | tuple):
                hint = "; a function that returns lists says so by its attribute per (token, turn or separator)"
            what = f"returned {_described(score)} for completion {index}; a score is a finite float32 or None"
            checked.refused[index] = what + hint
    return checked


def _checked_lists(listed: Sequence[Any], lengths: Sequence[int]) -> CheckedScores:
    """A list of `lengths[i]` numbers for each completion i, or None."""
    checked = CheckedScores([None] * len(listed), lists=[None] * len(listed))
    assert checked.lists is not None
    for index, (score, length) in enumerate(zip(listed, lengths, strict=True)):
        if score is None:
            continue
        wanted = f"a list of {length} finite float32 or None, as its attribute per says"
        what = f"returned {_described(score)} for completion {index}; wanted is {wanted}"
        try:
            values = [finite_number(value) for value in score] if not isinstance(score, str | Mapping) else None
        except TypeError:  # a number, or an array without dimensions
            values = None
        if values is None:
            checked.refused[index] = what
            continue
        numbers = [value for value in values if value is not None and abs(value) <= FLOAT32_MAX]
        total = math.fsum(numbers)
        if len(values) != length:
            what = f"returned {len(values)} numbers for completion {index}; wanted is {wanted}"
            checked.refused[index] = what
        elif len(numbers) < length or abs(total) > FLOAT32_MAX:
            checked.refused[index] = what
        else:
            checked.values[index], checked.lists[index] = total, numbers
    return checked


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
        """``log_extra(column, values)``; several calls for one column append. Kept are copies of the values."""
        self.columns.setdefault(str(column), []).extend(copied(list(values)))

    def check(self, count: int) -> None:
        """Raises BadScores unless every column has a value for each of `count` completions."""
        for name, values in self.columns.items():
            if len(values) != count:
                raise BadScores(
                    f"logged {len(values)} values of log_extra column '{name}' for {count} completions"
                )


def _described(value: Any) -> str:
    text = brief(value, TEXT)
    return (
        text if value is None else f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
    )
