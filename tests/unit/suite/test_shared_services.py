"""Servers that the workers of one session of tests share: ended by the last, or else with the session."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import services, session


@pytest.fixture
def naps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Every process that `begin` has started, in a session of tests of their own."""
    monkeypatch.setenv(session.VARIABLE, str(tmp_path))
    monkeypatch.setattr(services, "_used", {})
    yield (started := [])
    for process in started:
        process.kill()
        process.wait()


def begin(started: list[subprocess.Popen[bytes]]) -> services.Facts:
    def start(_: Path) -> services.Facts:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return {"pid": started[-1].pid}

    return services.shared("nap", start)


def test_the_last_user_ends_it(naps: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    assert begin(naps) == begin(naps)
    with (tmp_path / "service-nap" / "users").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        services.leave_services()
        assert naps[0].poll() is None
    begin(naps)
    services.leave_services()
    assert (len(naps), services.is_running(naps[0].pid)) == (1, False)
    assert services.is_running(begin(naps)["pid"])  # the next user has another
    assert len(naps) == 2


NEVER_WAITS = """
import subprocess, sys
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
sys.stdin.read()
"""


def test_one_that_another_worker_started_has_ended_though_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(psutil.Process, "kill", lambda process: killed.append(process.pid))
    command = [sys.executable, "-c", NEVER_WAITS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        services.end_group(pid, seconds=1)
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert killed == []


def test_one_whose_users_were_killed_ends_with_the_session(naps: list[subprocess.Popen[bytes]]) -> None:
    begin(naps)
    services._used.clear()  # as where the kernel has closed the files of a killed worker
    services.end_services()
    assert not services.is_running(naps[0].pid)
