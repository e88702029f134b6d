"""SIGINT and SIGTERM as exceptions that cannot get lost.

An exception raised while a library's `__del__` runs is swallowed by Python. So the signal is also remembered,
and the trainer asks for it before every step, evaluation and save.
"""

from __future__ import annotations

import signal
from types import FrameType

_received: list[int] = []


class Terminated(BaseException):
    """SIGTERM: like Ctrl-C, observers hear of it and generators are closed.

    No KeyboardInterrupt, which the library of the command line ends with 130, and no SystemExit, which a
    user's function may raise.
    """


def install_handlers() -> None:
    """Raise KeyboardInterrupt on SIGINT and `Terminated` on SIGTERM, and remember either; main thread only."""
    _received.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: whoever started it wants it so
            signal.signal(number, _handle)


def raise_if_signalled() -> None:
    """Raise what the last signal raised, in case that was swallowed."""
    if _received:
        raise _exception(_received[-1])


def _handle(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    raise _exception(number)


def _exception(number: int) -> BaseException:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
