"""A phase that lasts is told once, with stacks, and ends in RunFailed; connections get limits of their own."""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.patience import patient

from grpox.config import WatchdogConfig
from grpox.errors import RunFailed
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.watchdog import INTERRUPT, PROBES, Watchdog, enable_tcp_keepalive


def watched(folder: Path, times: PhaseTimes, tell_after: float, end_after: float) -> Watchdog:
    return Watchdog(WatchdogConfig(tell_after=tell_after, end_after=end_after), times, folder, rank=3)


def told_when(capfd: pytest.CaptureFixture[str], text: str) -> str:
    """Wait until `text` is on standard error, and return all that is."""
    told, end = "", time.monotonic() + patient(30)
    while text not in told:
        assert time.monotonic() < end, told
        time.sleep(0.01)
        told += capfd.readouterr().err
    return told


def test_a_stall_is_told_once_with_the_line_where_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    times = PhaseTimes()
    with watched(tmp_path, times, 0.2, 600) as watchdog, times.phase("reward"):
        told = told_when(capfd, "rank 3 has been in phase 'reward' for ")
        watchdog._look(time.perf_counter() + 9)
    assert "rank 3" not in capfd.readouterr().err
    assert told.count("rank 3 has been in phase 'reward' for ") == 1
    stacks = (tmp_path / "rank-00003.txt").read_text()
    assert "test_a_stall_is_told_once_with_the_line_where_it_is" in stacks


def test_phases_that_move_on_are_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times = PhaseTimes()
    with watched(tmp_path / "stalls", times, 1000, 5000) as watchdog:
        for _ in range(3):
            with times.phase("update"):
                watchdog._look(time.perf_counter() + 900)
        assert capfd.readouterr().err == ""
        assert not (tmp_path / "stalls").exists()
        with times.phase("update"):
            watchdog._look(time.perf_counter() + 1100)
    assert "rank 3 has been in phase 'update' for 1100 s" in capfd.readouterr().err


def test_a_phase_that_lasts_too_long_is_ended(tmp_path: Path) -> None:
    times = PhaseTimes()
    before = signal.getsignal(INTERRUPT)
    with (
        pytest.raises(RunFailed, match="rank 3 has been in phase 'generate' for") as failure,
        watched(tmp_path, times, 0.2, 0.5),
        times.phase("generate"),
    ):
        threading.Event().wait(600)
    assert "rank-00003.txt" in str(failure.value)
    assert signal.getsignal(INTERRUPT) == before


def test_a_pause_is_no_stall(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times = PhaseTimes()
    with watched(tmp_path, times, 0.2, 0.5) as watchdog:
        watchdog.pause()
        time.sleep(1)  # longer than a phase may last
        watchdog.resume()
        assert 1 <= watchdog.paused_for < patient(60)
        assert "rank 3" not in capfd.readouterr().err
        told_when(capfd, "rank 3 has been in phase 'between phases' for 0 s")


def test_a_rank_that_waits_for_others_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times = PhaseTimes()
    with watched(tmp_path, times, 0.2, 0.5) as watchdog, times.phase("gather"):
        told_when(capfd, "rank 3 has been waiting for the other ranks for ")
        watchdog._look(time.perf_counter() + 30)  # longer than it may stall, but it is another rank that does


def test_stacks_that_cannot_be_written_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    times = PhaseTimes()
    with watched(tmp_path / "file", times, 0.2, 600), times.phase("reward"):
        told_when(capfd, "its stacks could not be written")


def test_it_goes_on_where_there_is_no_memory_for_arming(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def full(*arguments: object, **more: object) -> None:
        tried.set()
        raise RuntimeError("unable to start watchdog thread")

    times = PhaseTimes()
    with watched(tmp_path, times, 0.2, 600):
        monkeypatch.setattr(faulthandler, "dump_traceback_later", full)
        assert tried.wait(patient(10))
        with times.phase("reward"):
            told = told_when(capfd, "rank 3 has been in phase 'reward' for ")
    assert "Traceback" not in told


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is Linux's")


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname()) as client:
        yield client


def own_address() -> str:
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return str(each.address)
    pytest.skip("this machine has no address but loopback")


def limits(connection: socket.socket) -> dict[str, int]:
    tcp = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    told = {name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in tcp}
    return told | {"SO_KEEPALIVE": connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}


@linux
@pytest.mark.parametrize(("seconds", "probe"), [(50, 10), (1, 1), (2.4, 1)])
def test_a_connection_to_another_machine_is_lost_after_as_long_as_asked(seconds: float, probe: int) -> None:
    with connected(own_address()) as connection:
        before = connection.fileno()
        assert enable_tcp_keepalive(seconds) >= 1
        assert connection.fileno() == before
        connection.sendall(b"still open")
        assert limits(connection) == {
            "SO_KEEPALIVE": 1,
            "TCP_KEEPIDLE": probe,
            "TCP_KEEPINTVL": probe,
            "TCP_KEEPCNT": PROBES,
            "TCP_USER_TIMEOUT": seconds * 1000,
        }


@linux
def test_loopback_is_left_alone() -> None:
    with connected("127.0.0.1") as connection:
        before = limits(connection)
        enable_tcp_keepalive(50)
        assert limits(connection) == before
        assert before["SO_KEEPALIVE"] == 0


@linux
def test_files_that_are_no_connections_stay_unchanged() -> None:
    pair, datagrams = socket.socketpair(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener = socket.create_server((own_address(), 0))
    found = enable_tcp_keepalive(50)
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    with connected(own_address()):
        assert enable_tcp_keepalive(50) - found == 1
    for each in (*pair, datagrams, listener):
        each.close()
