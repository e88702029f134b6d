"""`grpox watch`: its first line, its end, and runs that are none."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.patience import patient
from support.watched_runs import append_metrics, metrics_line, write_record

from grpox.cli import watch
from grpox.errors import ConfigError, Problem


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with runs in folders below it."""
    for name in ("runs/first", "runs/sweep/seed=1", "runs/other/twice", "runs/twice"):
        append_metrics(write_record(tmp_path / name), metrics_line(1, {"reward": 0.5}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(runs: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "grpox", "watch", "runs/first", "--no-browser"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        yield process
        process.kill()


def test_the_first_line_is_the_address_and_ctrl_c_ends_it_quietly(command: subprocess.Popen[str]) -> None:
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


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("runs/first", "runs/first"),
        ("first", "runs/first"),
        ("seed=1", "runs/sweep/seed=1"),
        ("runs/first/", "runs/first"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_run_is_found_by_its_folder_or_name(given: str, folder: str) -> None:
    assert watch.find_run(given) == Path(folder)


@pytest.mark.parametrize(
    ("given", "part", "nearest"),
    [
        ("runs/frist", "no such run here", "runs/first"),
        ("sed=1", "no such run here", "seed=1"),
        ("empty", "no such run here", ""),
        ("runs", "means several", ""),
        ("twice", "means several", ""),
        ("x" * 5000, "no such run here", ""),
    ],
)
@pytest.mark.usefixtures("runs")
def test_what_is_no_run_is_refused(given: str, part: str, nearest: str) -> None:
    problem = watch.find_run(given)
    assert isinstance(problem, Problem)
    assert problem.key == "RUN"
    assert part in problem.what
    assert problem.nearest == nearest


@pytest.mark.usefixtures("runs")
def test_all_wrong_runs_and_a_port_in_use_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        watch.watch(["one", "runs/first", "two"], port=0, no_browser=True)
    assert [problem.given for problem in caught.value.problems] == ["one", "two"]
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        watch.watch(["runs/first"], port=taken.getsockname()[1], no_browser=True)
    assert caught.value.problems[0].key == "--port"


@pytest.mark.parametrize(
    ("variables", "opens"),
    [
        ({}, False),
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "w"}, True),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "x"}, False),
    ],
)
def test_a_browser_is_opened_only_where_the_user_sees_it(
    variables: dict[str, str], opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("webbrowser.open", opened.append)
    thread = watch.open_browser("http://127.0.0.1:1/")
    if thread is not None:
        thread.join()
    assert opened == ["http://127.0.0.1:1/"] * opens
