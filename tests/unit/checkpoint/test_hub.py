"""Pushing to the hub: a small hub on this machine takes it, or refuses it in each way a real one would."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from grpox.checkpoint.save_model import check_hub, push_model
from grpox.config import HubConfig, RunConfig
from grpox.errors import ConfigError, RunFailed
from grpox.runfile.paths import hub_problems

SUMMARY = {"steps": 100, "accuracy_before": 0.3, "accuracy_after": 0.91234}


@dataclass
class FakeHub:
    """Answers of the hub about the token, and the files pushed to it."""

    user: dict[str, Any] = field(default_factory=lambda: user("ada", "write"))
    status: int = 200
    created: list[dict[str, Any]] = field(default_factory=list)
    branches: list[str] = field(default_factory=list)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Path of the request -> file -> content."""


def user(name: str, role: str, *orgs: str) -> dict[str, Any]:
    return {
        "name": name,
        "orgs": [{"name": org} for org in orgs],
        "auth": {"accessToken": {"role": role}},
    }


def handler_of(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            authorized = self.headers["authorization"] == "Bearer hf_secret"
            if hub.status != 200 or not authorized:
                self.answer({"error": "no"}, hub.status if authorized else 401)
            else:
                self.answer(hub.user if self.path == "/api/whoami-v2" else {"siblings": [], "sha": "0"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if hub.status != 200:
                self.answer({"error": "You don't have the rights"}, hub.status)
            elif self.path == "/api/repos/create":
                hub.created.append(json.loads(body))
                self.answer({"url": f"http://{self.headers['host']}/ada/model"})
            elif "/branch/" in self.path:
                hub.branches.append(self.path.rpartition("/")[2])
                self.answer({})
            elif "/preupload/" in self.path:
                files = [file["path"] for file in json.loads(body)["files"]]
                told = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
                self.answer({"files": told})
            elif self.path == "/api/validate-yaml":  # the model card's front matter
                self.answer({"errors": [], "warnings": []})
            else:
                values = [json.loads(line)["value"] for line in body.splitlines()]
                pushed = {v["path"]: base64.b64decode(v["content"]) for v in values if "path" in v}
                hub.commits[self.path] = pushed
                address = f"http://{self.headers['host']}/ada/model/commit/1"
                self.answer({"commitUrl": address, "commitOid": "1"})

        def answer(self, data: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Not to the terminal."""

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(fake))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    point_at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield fake
    server.shutdown()
    server.server_close()


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def run_config(path: str = "/models/base", **hub: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": path},
            "data": {"path": "/data/train.jsonl"},
            "rewards": ["exact", {"name": "length", "weight": 0.5}],
            "loss": "dr_grpo",
            "hub": {"repo": "ada/model"} | hub,
        }
    )


def push(folder: Path, **hub: Any) -> str:
    config = run_config(**hub)
    assert config.hub is not None
    return push_model(folder, config, config.hub, SUMMARY)


# -- Before the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("repo", ["ada/model", "org-1/Model_2.5-GRPO"])
def test_a_name_that_the_hub_takes(repo: str) -> None:
    assert list(hub_problems(HubConfig(repo=repo))) == []
    assert list(hub_problems(None)) == []


@pytest.mark.parametrize("repo", ["model", "a/b/c", "ada/mo del", "ada/-model", "ada/a..b", "", "ada/m.git"])
def test_a_name_that_it_does_not(repo: str) -> None:
    [problem] = hub_problems(HubConfig(repo=repo))
    assert (problem.key, problem.given, problem.allowed) == ("hub.repo", repo, "user/name")


def test_a_branch_has_a_name() -> None:
    assert [p.key for p in hub_problems(HubConfig(repo="ada/model", revision=" "))] == ["hub.revision"]


def refused(repo: str = "ada/model") -> str:
    with pytest.raises(ConfigError) as caught:
        check_hub(HubConfig(repo=repo))
    [problem] = caught.value.problems
    assert (problem.key, problem.given) == ("hub.repo", repo)
    assert "\n" not in problem.what
    return problem.what


def test_a_token_that_may_write_passes(hub: FakeHub) -> None:
    check_hub(HubConfig(repo="ada/model"))
    hub.user = user("ada", "write", "org")
    check_hub(HubConfig(repo="org/model"))
    hub.user = user("ada", "fineGrained")
    check_hub(HubConfig(repo="org/model"))


@pytest.mark.parametrize(
    ("role", "token", "repo", "told"),
    [
        ("read", "hf_secret", "ada/model", "the token of 'ada' may only read: "),
        ("write", "hf_secret", "bob/model", "the token is of 'ada', who has no such namespace"),
        ("write", "hf_other", "ada/model", "the hub cannot be used: HfHubHTTPError: .*401"),
        ("write", "", "ada/model", "there is no token for the hub: set HF_TOKEN, or run `hf auth login`"),
    ],
)
def test_a_token_that_may_not_push_is_refused(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, role: str, token: str, repo: str, told: str
) -> None:
    hub.user = user("ada", role)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token or None)
    assert re.match(told, refused(repo))


def test_a_hub_that_is_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    point_at(monkeypatch, "http://127.0.0.1:9")
    assert refused().startswith("the hub cannot be used: ConnectError: ")


# -- After it --------------------------------------------------------------------------------------------


def test_the_folder_is_pushed_with_a_model_card(hub: FakeHub, folder: Path) -> None:
    push(folder, private=True)
    assert [(repo["name"], repo["organization"]) for repo in hub.created] == [("model", "ada")]
    assert hub.created[0].get("private") or hub.created[0].get("visibility") == "private"
    [(path, files)] = hub.commits.items()
    assert path == "/api/models/ada/model/commit/main"
    assert files == {"config.json": b"{}", "README.md": (folder / "README.md").read_bytes()}


def test_a_branch_is_made_and_pushed_to(hub: FakeHub, folder: Path) -> None:
    push(folder, revision="try-2")
    assert hub.branches == ["try-2"]
    assert list(hub.commits) == ["/api/models/ada/model/commit/try-2"]


def test_a_push_that_fails_says_where_the_model_is(hub: FakeHub, folder: Path) -> None:
    hub.status = 403
    with pytest.raises(RunFailed) as caught:
        push(folder, private=True, revision="try-2")
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"the model is trained and lies in {folder}, but the push to ada/model failed: ")
    assert "403" in first
    assert second == f"push it by hand: hf upload ada/model {folder} --private --revision try-2"
    assert (folder / "README.md").is_file()
