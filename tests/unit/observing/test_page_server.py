"""The page's server: its answers over a real socket, and whom it refuses."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.patience import patient
from support.watched_runs import append_metrics, metrics_line, write_batch, write_record

from grpox.observing.page.server import WatchedRuns, address_of, build_server, new_token, open_listener

TOKEN = "a-token-that-is-the-same-in-every-process"  # it is in the names of tests
EVIL = "<script>alert(1)</script>"


def get(port: int, path: str, token: str | None = TOKEN, method: str = "GET", **headers: str) -> Any:
    """Send a request; the path goes out as it is."""
    connection = HTTPConnection("127.0.0.1", port, timeout=patient(30))
    if token is not None:
        headers = {"Authorization": f"Bearer {token}", **headers}
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        text, found = response.read().decode(), response.getheaders()
        headers = {name.lower(): value for name, value in found}
        facts = {"status": response.status, "text": text, "headers": headers}
        return SimpleNamespace(**facts, json=lambda: json.loads(text))
    finally:
        connection.close()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server of the run ``one``, beside which another run and a folder without one lie."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        folder = write_record(root / name)
        append_metrics(folder, metrics_line(1, {"reward": 0.5, "time/update": 2.0}))
        write_batch(folder, 1, [("What?", EVIL, 1.0)])
    (root / "notes").mkdir()
    (root / "secret.txt").write_text("secret")
    (root / "link").symlink_to(root / "two")
    with open_listener() as listener:
        runs = WatchedRuns([root / "one"])
        server = build_server(runs, TOKEN)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        port = listener.getsockname()[1]
        assert address_of(listener, "abc") == f"http://127.0.0.1:{port}/?token=abc"
        yield port
        server.should_exit = True
        thread.join()
        runs.close()


def test_the_page_opens_with_the_token_alone(port: int) -> None:
    page = get(port, f"/?token={TOKEN}", token=None)
    assert (page.status, "<html" in page.text) == (200, True)
    assert (page.headers["referrer-policy"], page.headers["cache-control"]) == ("no-referrer", "no-store")
    cookie = page.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
    assert new_token() != new_token()
    assert len(new_token()) >= 32
    assert TOKEN not in cookie  # which the browser sends to other users' servers on this machine too
    assert get(port, "/", token=None, Cookie=cookie.partition(";")[0]).status == 200  # a reload
    assert get(port, "/api/run", token=None, Cookie=cookie.partition(";")[0]).status == 401


@pytest.mark.parametrize("path", ["/", "/api/run", "/favicon.ico", "/api/nothing", f"/api/run?token={TOKEN}"])
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_without_the_token_every_path_is_refused(port: int, path: str, token: str | None) -> None:
    answer = get(port, path, token)
    assert answer.status == 401
    assert set(answer.json()) == {"error"}
    assert "set-cookie" not in answer.headers


def test_another_site_is_refused_and_a_tunnel_is_not(port: int) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil:1", "", "[::2]:80", "0.0.0.0"):
        assert get(port, "/api/run", Host=host).status == 403
        assert get(port, f"/?token={TOKEN}", Host=host).status == 403
    for host in ("localhost", "localhost:9000", "127.0.0.1:9000", "[::1]:9000"):
        assert get(port, "/api/run", Host=host).status == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):  # nothing can be changed
        assert get(port, "/api/run", method=method).status == 405


def test_nothing_outside_the_runs_can_be_read_and_wrong_parameters_are_named(port: int) -> None:
    for path in (
        "/secret.txt", "/../secret.txt", "/..%2fsecret.txt", "/api/../../secret.txt", "/api/..%2fsecret.txt",
        "/api/run?run=../secret", "/api/run?run=notes", "/api/run?run=link", "/api/run?run=/etc",
        "/api/tokens?id=../../secret.txt", "/api/tokens?id=step_000001:0/../x", "/api/tokens?id=/etc/passwd:0",
        "/api/_read", "/api/close", "/api/index", "/api/__class__",
    ):  # fmt: skip
        answer = get(port, path)
        assert answer.status in (400, 404), path
        assert set(answer.json()) == {"error"}
        assert "root:" not in answer.text
    for query in (
        "completions?limit=many", "completions?reward_min=nan", "completions?order=x",
        "completions?group_by_prompt=perhaps", "completions?nothing=1", "metrics?points=-", "phases?step=1.5",
        "tokens?id=1",
    ):  # fmt: skip
        answer = get(port, f"/api/{query}")
        assert answer.status == 400, query
        assert query.partition("?")[2].partition("=")[0] in answer.json()["error"]


def test_answers(port: int) -> None:
    runs = [(run["name"], run["shown"]) for run in get(port, "/api/runs").json()]
    assert runs == [("one", True), ("two", False)]
    assert get(port, "/api/run").json()["name"] == "one"
    assert get(port, "/api/run?run=two").json()["name"] == "two"
    metrics = get(port, "/api/metrics?since=0&points=100").json()
    assert metrics["series"] == {"reward": [[1], [0.5]], "time/update": [[1], [2]]}
    assert get(port, "/api/phases?step=1").json()["phases"] == [["update", 2]]
    assert get(port, "/api/compare?run=one&run=two").json()["runs"] == ["one", "two"]
    assert get(port, "/api/tokens?id=step_000001:0").json() == {"tokens": []}
    deadline = time.monotonic() + patient(20)
    path = "/api/completions?text=%3Cscript&reward_min=0.5&group_by_prompt=false&order=reward&limit=5"
    while not (answer := get(port, path).json())["is_indexed"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [row["completion"] for row in answer["rows"]] == [EVIL]
    assert get(port, path).headers["content-type"] == "application/json"


def test_runs_of_one_name_and_unreadable_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write_record(tmp_path / place / "run") for place in ("a", "b")]
    runs = WatchedRuns(folders)
    names = [run["name"] for run in runs.runs()]
    assert names == ["run", "b/run"]
    assert [runs.source(name).folder for name in names] == folders
    runs.close()
    private, stat = write_record(tmp_path / "a" / "private"), os.stat

    def refused(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).startswith(f"{private}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refused)
    assert [run["name"] for run in WatchedRuns(folders[:1]).runs()] == ["run"]


def test_the_server_beside_a_run_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        "from grpox.observing.page.server import serve_beside\n"
        f"with serve_beside(pathlib.Path({str(tmp_path)!r})) as address:\n"
        "    print(address, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        base, _, token = process.stdout.readline().strip().partition("/?token=")
        port = int(base.rpartition(":")[2])
        assert get(port, "/api/runs", token).status == 200
        os.kill(process.pid, signal.SIGKILL)
    with suppress(ConnectionError):
        for _ in range(round(patient(20) / 0.05)):
            get(port, "/api/runs", token)
            time.sleep(0.05)
        pytest.fail("the server goes on without its run")
