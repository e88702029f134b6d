"""Pushing to the hub: a small hub on this machine takes it, or refuses it in each way a real one would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub import TOKEN, FakeHub, serve, user

from grpox.checkpoint.save_model import check_hub, push_model
from grpox.config import HubConfig, RunConfig
from grpox.errors import ConfigError, RunFailed
from grpox.runfile.paths import hub_problems


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve(fake) as address:
        point_at(monkeypatch, address)
        yield fake


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def push(folder: Path, **hub: Any) -> str:
    inputs = {"model": {"path": "/models/base"}, "data": {"path": "/data/train.jsonl"}, "rewards": ["exact"]}
    config = RunConfig.model_validate(inputs | {"hub": {"repo": "ada/model"} | hub})
    assert config.hub is not None
    return push_model(folder, config, config.hub, {"steps": 100})


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
        ("read", TOKEN, "ada/model", "the token of 'ada' may only read: "),
        ("write", TOKEN, "bob/model", "the token is of 'ada', who has no such namespace"),
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
    monkeypatch.setenv("HF_TOKEN", TOKEN)
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
