"""Logging below the logger ``grpox``; records have a rank and contain no secrets.

A program that calls `grpox.train` gets the records through its own handlers. grpox adds handlers only in
`show_logs`, which every command calls.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, Problem, text_of, visible
from grpox.errors.redaction import redact
from grpox.runtime import launch

ROOT = "grpox"
LEVELS = ("debug", "info", "warning", "error")
LEVEL_VARIABLE, FILE_VARIABLE = "GRPOX_LOG_LEVEL", "GRPOX_LOG_FILE"
"""Environment variables for ``--log-level`` and ``--log-file``, which child processes inherit."""
DISPLAYED: Mapping[str, Any] = {"is_displayed": True}
"""`extra` of a record that is already on the screen; only files and a program's own handlers write it."""
PLAIN_FORMAT = "%(asctime)s %(levelname)s rank %(rank)d %(name)s: %(message)s"
_STYLES = {logging.DEBUG: "dim", logging.WARNING: "yellow", logging.ERROR: "bold red"}

_handlers: list[logging.Handler] = []
"""Handlers that `show_logs` added."""


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, below ``grpox``: ``grpox.mlflow.store`` for ``grpox_mlflow.store``.

    Args:
        name: ``__name__`` of the module, also of a plugin's.
    """
    if name.startswith(f"{ROOT}_"):
        name = name.removeprefix(f"{ROOT}_")
    logger = logging.getLogger(name if name.partition(".")[0] == ROOT else f"{ROOT}.{name}")
    logger.addFilter(_prepare)  # a second time it changes nothing
    return logger


def show_logs(level: str = "info", file: Path | None = None) -> None:
    """Show records on standard error, and also write them into `file`; replaces an earlier call.

    A terminal shows only the text, with warnings in yellow; elsewhere time, level, rank and logger come first.
    Ranks other than 0 show warnings and errors, and everything at level debug. Until `hide_logs`, handlers of
    the root logger get no records of grpox.

    Args:
        level: lowest level to show and write: debug, info, warning or error.
        file: file of rank 0, appended to; rank 1 writes ``run.rank1.log`` beside ``run.log``.

    Raises:
        ConfigError: the level does not exist, or the file cannot be written.
    """
    if level.lower() not in LEVELS:
        raise ConfigError("no such level", "--log-level", given=level, allowed=", ".join(LEVELS))
    handlers: list[logging.Handler] = [_Screen(shows_all=level.lower() == "debug")]
    if file is not None:
        handlers.append(_open_file(file))
    hide_logs()
    logger = logging.getLogger(ROOT)
    for handler in handlers:
        handler.addFilter(_prepare)
        handler.setFormatter(logging.Formatter(PLAIN_FORMAT, "%Y-%m-%d %H:%M:%S"))
        logger.addHandler(handler)
    _handlers.extend(handlers)
    logger.setLevel(level.upper())
    logger.propagate = False


def hide_logs() -> None:
    """Undo `show_logs`."""
    logger = logging.getLogger(ROOT)
    for handler in _handlers:
        logger.removeHandler(handler)
        handler.close()
    _handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


class WarnOnce:
    """Logs one warning per key, and drops further warnings with the same key.

    Args:
        logger: logger of the warning module.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[str] = set()

    def __call__(self, key: str, warning: str) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self._logger.warning("%s", warning)

    def all(self, warnings: Mapping[str, str]) -> None:
        """Log `warnings`, a mapping of key -> text, each key once."""
        for key, warning in warnings.items():
            self(key, warning)


def _prepare(record: logging.LogRecord) -> bool:
    """Add the rank to a record, mask secrets in its text and traceback, and escape what is `INVISIBLE`."""
    record.rank = launch.rank_or_zero()
    record.msg, record.args = visible(redact(record.getMessage())), ()
    if record.exc_info and not record.exc_text:
        record.exc_text = visible(redact(logging.Formatter().formatException(record.exc_info)))
    return True


class _Screen(logging.Handler):
    """Writes to the current standard error: by rich on a terminal, else in plain lines."""

    def __init__(self, shows_all: bool) -> None:
        super().__init__()
        self._shows_all = shows_all

    def emit(self, record: logging.LogRecord) -> None:
        rank, stream = launch.rank_or_zero(), sys.stderr
        is_of_interest = rank == 0 or record.levelno >= logging.WARNING or self._shows_all
        # There is no stream if grpox was started as `grpox ... 2>&-`.
        if not is_of_interest or hasattr(record, "is_displayed") or stream is None:
            return
        try:
            if not stream.isatty():
                stream.write(self.format(record) + "\n")
                stream.flush()
                return
            from grpox.errors.console import Console  # imported only for a terminal

            kind = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
            line = f"{kind}{f'[rank {rank}] ' if rank else ''}{record.getMessage()}"
            text, style = "\n".join(filter(None, (line, record.exc_text))), _STYLES.get(record.levelno)
            Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        except Exception:  # noqa: BLE001 - logging's own convention for records that cannot be written
            self.handleError(record)


class _File(logging.FileHandler):
    """A log file that warns once if it cannot be written any more, for example on a full disk."""

    _is_broken = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._is_broken:
            self._is_broken = True
            why = text_of(sys.exc_info()[1] or OSError("unknown error"))
            get_logger(__name__).warning("the log file %s cannot be written: %s", self.baseFilename, why)

    def close(self) -> None:
        with suppress(OSError):  # the failing record has already caused a warning
            super().close()


def _open_file(path: Path) -> _File:
    rank = launch.rank_or_zero()
    own = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path
    try:
        return _File(own, encoding="utf-8")
    except OSError as error:
        problem = Problem(f"cannot be written: {text_of(error)}", "--log-file", given=str(own))
        raise ConfigError(problem) from error
