"""Records of grpox have their rank and no secret, reach a program's own handlers, and are shown by commands."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.logs import LOGGED
from support.problems import problem_of

from grpox.runtime.logs import DISPLAYED, WarnOnce, get_logger, hide_logs, show_logs

LOGGER = get_logger("grpox.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def hidden() -> Iterator[None]:
    """Nothing of a test's logs is left, nor of the run that it says it is of."""
    logging.getLogger("grpox").removeHandler(LOGGED)
    yield
    hide_logs()


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return what stands on standard error since the last call."""
    return lambda: capsys.readouterr().err


def test_loggers_of_modules_and_of_plugins_are_below_grpox() -> None:
    assert get_logger("grpox.rollout.sampler").name == "grpox.rollout.sampler"
    assert get_logger("grpox_mlflow.store").name == "grpox.mlflow.store"
    assert get_logger("acme_rewards").name == "grpox.acme_rewards"


def test_a_programs_own_handler_gets_records_with_rank_and_without_secrets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert logging.getLogger("grpox").handlers == []
    LOGGER.warning("%s does not answer, 100%% sure", "https://me:hunter2@host")
    [record] = caplog.records
    assert (record.getMessage(), record.rank) == ("https://me:***@host does not answer, 100% sure", 3)


def test_a_traceback_has_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("https://me:hunter2@host")
    except ValueError:
        LOGGER.exception("failed")
    assert "hunter2" not in caplog.text
    assert "ValueError: https://me:***@host" in caplog.text


def test_elsewhere_than_on_a_terminal_lines_have_time_level_rank_and_logger_until_hidden(
    shown: Callable[[], str],
) -> None:
    show_logs()
    LOGGER.debug("not shown")
    LOGGER.info("one [line]\n    and another")
    date, time, rest = shown().split(" ", 2)
    assert (len(date), len(time)) == (10, 8)
    assert rest == "INFO rank 0 grpox.test: one [line]\n    and another\n"
    hide_logs()
    assert logging.getLogger("grpox").handlers == []
    assert logging.getLogger("grpox").propagate
    LOGGER.warning("to the program's handlers alone")
    assert shown() == ""


def test_on_a_terminal_the_text_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    show_logs()
    LOGGER.info("one [red]line[/]")
    LOGGER.warning("another " * 40)
    plain = terminal.getvalue().replace("\x1b[0m", "")
    assert plain == f"one [red]line[/]\nwarning: {'another ' * 40}\n"


def test_of_the_other_ranks_warnings_are_shown_and_at_debug_everything(
    shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    show_logs()
    LOGGER.info("quiet")
    LOGGER.warning("loud")
    show_logs("debug")
    LOGGER.debug("all")
    assert [line.split(" ", 2)[2] for line in shown().splitlines()] == [
        "WARNING rank 1 grpox.test: loud",
        "DEBUG rank 1 grpox.test: all",
    ]


def test_each_rank_has_a_file_with_what_stands_on_the_screen_already(
    tmp_path: Path, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        show_logs("info", tmp_path / "run.log")
        LOGGER.info("step 1/2", extra=DISPLAYED)
        LOGGER.debug("below the level")
    assert shown() == ""
    assert (tmp_path / "run.log").read_text().endswith("INFO rank 0 grpox.test: step 1/2\n")
    assert (tmp_path / "run.rank1.log").read_text().endswith("INFO rank 1 grpox.test: step 1/2\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_file_that_cannot_be_written_any_more_is_told_once(shown: Callable[[], str]) -> None:
    show_logs("info", Path("/dev/full"))
    for _ in range(3):
        LOGGER.info("a line")
    assert shown().count("the log file /dev/full cannot be written: ") == 1


def test_a_level_or_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    assert problem_of(show_logs, "loud").key == "--log-level"
    assert problem_of(show_logs, "info", tmp_path / "nowhere" / "run.log").key == "--log-file"
    assert logging.getLogger("grpox").handlers == []


def test_a_warning_of_one_key_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    warn = WarnOnce(LOGGER)
    warn("a", "first")
    warn("a", "second")
    warn.all({"a": "third", "b": "other"})
    assert caplog.messages == ["first", "other"]
