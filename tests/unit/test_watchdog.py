"""A phase that lasts is told once, with stacks, and ends in RunFailed; one that moves on is left alone."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from pathlib import Path

import pytest

from grpox.config import WatchdogConfig
from grpox.errors import RunFailed
from grpox.metrics import PhaseTimes
from grpox.watchdog import INTERRUPT, Watchdog


def watched(folder: Path, times: PhaseTimes, tell_after: float, end_after: float) -> Watchdog:
    return Watchdog(WatchdogConfig(tell_after=tell_after, end_after=end_after), times, folder, rank=3)


def test_a_stall_is_told_once_with_the_line_where_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    times = PhaseTimes()
    with watched(tmp_path, times, 0.2, 60), times.phase("reward"):
        time.sleep(1.0)
    told = capfd.readouterr().err
    assert told.count("rank 3 has been in phase 'reward' for ") == 1
    stacks = (tmp_path / "rank-00003.txt").read_text()
    assert "test_a_stall_is_told_once_with_the_line_where_it_is" in stacks


def test_phases_that_move_on_are_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times = PhaseTimes()
    with watched(tmp_path / "stalls", times, 2.0, 60):
        end = time.perf_counter() + 3.0
        while time.perf_counter() < end:
            with times.phase("update"):
                time.sleep(0.01)
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "stalls").exists()


def test_a_phase_that_lasts_too_long_is_ended(tmp_path: Path) -> None:
    times = PhaseTimes()
    before = signal.getsignal(INTERRUPT)
    with (
        pytest.raises(RunFailed, match="rank 3 has been in phase 'generate' for") as failure,
        watched(tmp_path, times, 0.2, 0.5),
        times.phase("generate"),
    ):
        threading.Event().wait(60)
    assert "rank-00003.txt" in str(failure.value)
    assert signal.getsignal(INTERRUPT) == before


def test_a_rank_that_waits_for_others_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times = PhaseTimes()
    with watched(tmp_path, times, 0.2, 0.5), times.phase("gather"):
        time.sleep(1.5)  # longer than it may stall, but it is another rank that does
    assert "rank 3 has been waiting for the other ranks for " in capfd.readouterr().err


def test_stacks_that_cannot_be_written_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    times = PhaseTimes()
    with watched(tmp_path / "file", times, 0.2, 60), times.phase("reward"):
        time.sleep(1.0)
    assert "its stacks could not be written" in capfd.readouterr().err


def test_it_goes_on_where_there_is_no_memory_for_arming(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise RuntimeError("unable to start watchdog thread")

    times = PhaseTimes()
    with watched(tmp_path, times, 0.2, 60):
        monkeypatch.setattr(faulthandler, "dump_traceback_later", full)
        time.sleep(0.3)
        with times.phase("reward"):
            time.sleep(1.0)
    told = capfd.readouterr().err
    assert "rank 3 has been in phase 'reward' for " in told
    assert "Traceback" not in told
