"""SIGINT and SIGTERM as exceptions that cannot get lost.

An exception raised while a library's `__del__` runs is swallowed by Python. So the signal is also remembered,
and the trainer asks for it before every step, evaluation and save.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_received: list[int] = []
_waiting_notes: list[str] = []
"""One entry while the first signal waits: the text to print when it comes."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: like Ctrl-C, observers hear of it and generators are closed."""


def install_handlers() -> None:
    """Raise KeyboardInterrupt on SIGINT and `Terminated` on SIGTERM, and remember either; main thread only."""
    _received.clear()
    _handle_by(_handle)


def let_signals_kill() -> None:
    """Let a signal end the process at once: while Python exits, an exception is only a traceback."""
    _handle_by(signal.SIG_DFL)


def _handle_by(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: whoever started it wants it so
            signal.signal(number, handler)


def signalled() -> bool:
    """Tell whether a signal has come."""
    return bool(_received)


def may_be_signal() -> bool:
    """Return False where a KeyboardInterrupt was raised by hand: signals are remembered, and none has come."""
    is_remembered = _handle in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    return bool(_received) or not is_remembered


def raise_if_signalled() -> None:
    """Raise what the last signal raised, in case that was swallowed."""
    if _received:
        raise _exception(_received[-1])


def raise_if_signal(error: BaseException) -> None:
    """Raise the signal that foreign code was interrupted by, whatever it has made of it; else do nothing.

    Args:
        error: what the foreign code raised.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # signals are raised in the main thread only
    if isinstance(error, KeyboardInterrupt) and may_be_signal():
        raise error
    if not _waiting_notes or len(_received) > 1:
        raise_if_signalled()


@contextmanager
def first_signal_waits(note: str = "") -> Iterator[None]:
    """Within this block a first signal is only remembered; a second one is raised at once.

    For what must not be left half done, such as telling a tracker how the run ended.

    Args:
        note: printed on standard error when the signal comes.
    """
    if not _received:
        _waiting_notes.append(note)
    try:
        yield
    finally:
        _waiting_notes.clear()


def exit_code(error: KeyboardInterrupt) -> int:
    """130 for Ctrl-C and 143 for SIGTERM, as a shell tells them."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def _handle(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    if not _waiting_notes or len(_received) > 1:
        raise _exception(number)
    if _waiting_notes[0]:
        # Not by print: the signal may have come while that was at work.
        os.write(2, f"\n{signal.Signals(number).name}: {_waiting_notes[0]}\n".encode())


def _exception(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
