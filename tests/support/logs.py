"""The records of grpox's loggers, as a terminal would show them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from grpox.runtime.logs import hide_logs


class LoggedText(logging.Handler):
    """Keeps what is logged at the level info and above; of the others than info it names the level."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "is_displayed"):
            kind = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
            self._lines.append(f"{kind}{record.getMessage()}\n")

    def getvalue(self) -> str:
        """Return all of it."""
        return "".join(self._lines)

    def __call__(self) -> str:
        """Return what was logged since the last call."""
        text = self.getvalue()
        self._lines.clear()
        return text


LOGGED = LoggedText()
"""Records of the test that runs."""


@pytest.fixture(autouse=True)
def logged() -> Iterator[LoggedText]:
    logger = logging.getLogger("grpox")
    logger.addHandler(LOGGED)
    logger.setLevel(logging.INFO)
    yield LOGGED
    logger.removeHandler(LOGGED)
    hide_logs()  # a command that the test called shows them
    LOGGED()
