"""`grpox watch`: its first line, its end, and runs that are none."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.patience import patient
from support.watched_runs import append_metrics, metrics_line, write_record

from grpox.cli import watch
from grpox.errors import ConfigError, Problem


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with runs in folders below it."""
    for name in ("runs/first", "runs/sweep/seed=1", "runs/other/twice", "runs/twice"):
        append_metrics(write_record(tmp_path / name), metrics_line(1, {"reward": 0.5}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)


def test_the_first_line_is_the_address_and_ctrl_c_ends_it_quietly() -> None:
    words, pipe = [sys.executable, "-m", "grpox", "watch", "runs/first", "--no-browser"], subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as command:
        try:
            assert command.stdout is not None
            address, tunnel = (command.stdout.readline().rstrip("\n") for _ in range(2))
            base, _, token = address.partition("/?token=")
            port = base.removeprefix("http://127.0.0.1:")
            assert 1024 < int(port) < 65536
            assert f"ssh -N -L {port}:127.0.0.1:{port} " in tunnel
            with urllib.request.urlopen(address, timeout=patient(30)) as page:
                assert page.status == 200
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{base}/?token={token[:-1]}", timeout=patient(30))
            assert refused.value.code == 401
            refused.value.close()
            command.send_signal(signal.SIGINT)
            assert command.communicate(timeout=patient(30)) == ("", "")
            assert command.returncode == 0
        finally:
            command.kill()


def test_a_run_is_found_by_its_folder_or_name_and_what_is_no_run_is_refused() -> None:
    for given in ("runs/first", "first", "runs/first/"):
        assert watch.find_run(given) == Path("runs/first")
    assert watch.find_run("seed=1") == Path("runs/sweep/seed=1")
    for given, what, nearest in (
        ("runs/frist", "no such run here", "runs/first"),
        ("sed=1", "no such run here", "seed=1"),
        ("empty", "no such run here", ""),
        ("runs", "means several", ""),
        ("twice", "means several", ""),
        ("x" * 5000, "no such run here", ""),
    ):
        problem = watch.find_run(given)
        assert isinstance(problem, Problem)
        assert (problem.key, what in problem.what, problem.nearest) == ("RUN", True, nearest)
    with pytest.raises(ConfigError) as caught:
        watch.watch(["one", "runs/first", "two"], port=0, no_browser=True)
    assert [problem.given for problem in caught.value.problems] == ["one", "two"]
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        watch.watch(["runs/first"], port=taken.getsockname()[1], no_browser=True)
    assert caught.value.problems[0].key == "--port"


def test_a_browser_is_opened_only_where_the_user_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    for text, opens in (("", 0), ("DISPLAY", 1), ("WAYLAND_DISPLAY", 1), ("DISPLAY SSH_CONNECTION", 0)):
        for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
            monkeypatch.delenv(name, raising=False)
            if name in text.split():
                monkeypatch.setenv(name, ":0")
        opened.clear()
        if (thread := watch.open_browser("http://127.0.0.1:1/")) is not None:
            thread.join()
        assert opened == ["http://127.0.0.1:1/"] * opens
