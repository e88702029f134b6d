"""SIGINT and SIGTERM as exceptions that cannot get lost.

Python swallows an exception raised while a library's `__del__` runs. The signal is therefore also stored, and
the trainer checks for it before every step, evaluation and save.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_received: list[tuple[int, float]] = []
_waiting_notes: list[str] = []
"""One entry for each block that defers the first signal: the text to print when it arrives."""


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM: as after Ctrl-C, observers are notified and generators closed."""


def install_handlers() -> None:
    """Raise KeyboardInterrupt on SIGINT and `Terminated` on SIGTERM, and store the signal; main thread only."""
    _received.clear()
    _handle_by(_handle)


def let_signals_kill() -> None:
    """Make a signal end the process at once: while Python exits, an exception only prints a traceback."""
    _handle_by(signal.SIG_DFL)


def _handle_by(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored on purpose, as under nohup
            signal.signal(number, handler)


def signalled() -> bool:
    """Return True if a signal has arrived."""
    return bool(_received)


def may_be_signal() -> bool:
    """Return True if a signal caused a KeyboardInterrupt; False if code raised it without a signal."""
    is_remembered = _handle in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    return bool(_received) or not is_remembered


def raise_if_signalled() -> None:
    """Raise the exception of the last signal again, in case it was swallowed."""
    if _received:
        raise _exception(_received[-1][0])


def raise_if_signal(error: BaseException) -> None:
    """Raise the signal that interrupted foreign code, even if the code raised another error; else do nothing.

    Args:
        error: exception raised by the foreign code.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # signals are raised in the main thread only
    if isinstance(error, KeyboardInterrupt) and may_be_signal():
        raise error
    if not _waiting_notes or len(_received) > 1:
        raise_if_signalled()


@contextmanager
def first_signal_waits(note: str = "") -> Iterator[None]:
    """Store the first signal within this block without raising it; raise a second one at once.

    For work that must not stop halfway, such as reporting the end of a run to a tracker. Of nested blocks, the
    innermost gives the note.

    Args:
        note: text printed on standard error when the signal arrives.
    """
    before = [*_waiting_notes]
    if not _received:
        _waiting_notes.append(note)
    try:
        yield
    finally:
        _waiting_notes[:] = before


def exit_code(error: KeyboardInterrupt) -> int:
    """Return the exit code as in a shell: 130 for Ctrl-C and 143 for SIGTERM."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def _handle(number: int, _frame: FrameType | None) -> None:
    if _waiting_notes and _received and time.monotonic() - _received[0][1] < 1.0:
        return  # torchrun passes each signal on twice, and a terminal sends it to the ranks too
    _received.append((number, time.monotonic()))
    if not _waiting_notes or len(_received) > 1:
        raise _exception(number)
    if _waiting_notes[-1]:
        # Not by print: the signal may have arrived during a print.
        os.write(2, f"\n{signal.Signals(number).name}: {_waiting_notes[-1]}\n".encode())


def _exception(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
