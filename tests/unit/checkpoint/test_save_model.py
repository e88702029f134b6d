"""A saved model: its folder appears whole, a card says what it was trained from, and a hub takes it or not."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from support.hub import TOKEN, FakeHub, serve, user
from support.problems import problem_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from grpox.checkpoint.save_model import check_hub, model_card, push_model, save_model
from grpox.config import HubConfig, RunConfig
from grpox.errors import RunFailed
from grpox.runfile.paths import hub_problems
from grpox.runtime.world import World

TOKENIZER = Path(__file__).parents[3] / "grpox" / "runfile" / "recipes" / "quickstart" / "model"
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture
def model():
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))


def save(model, folder, world=ALONE, **changes):
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()} | changes
    engine = SimpleNamespace(weights=lambda: iter(weights.items()), module=model)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    save_model(engine, tokenizer, GenerationConfig(eos_token_id=[1, 5]), folder, world)


def test_the_folder_holds_the_engines_weights_the_tokenizer_and_the_end_tokens(model, tmp_path):
    (tmp_path / "model.unfinished").mkdir()  # an interrupted save left it
    (tmp_path / "model.unfinished" / "old.safetensors").write_text("")
    whole = torch.full((17, 8), 0.5)
    save(model, tmp_path / "model", **{"lm_head.weight": whole})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.lm_head.weight, whole)
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
    assert loaded.generation_config.eos_token_id == [1, 5]
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("1+1=")["input_ids"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "old.safetensors").exists()


def test_what_stood_in_its_place_is_moved_aside_each_time(model, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("kept")
    save(model, tmp_path / "model")
    (first,) = (tmp_path / "earlier").iterdir()
    assert (first / "mine.txt").read_text() == "kept"
    save(model, tmp_path / "model")
    assert len(list((tmp_path / "earlier").iterdir())) == 2
    assert (first / "mine.txt").read_text() == "kept"
    assert not (tmp_path / "model" / "mine.txt").exists()
    (tmp_path / "file").write_text("a file")
    save(model, tmp_path / "file")
    assert "a file" in [path.read_text() for path in (tmp_path / "earlier").glob("file*")]


def test_other_ranks_write_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda parts, mine: None)
    save(model, tmp_path / "model", World(rank=1, size=2, device=torch.device("cpu")))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_fit_leaves_the_one_before(model, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("kept")
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunFailed) as failed:
            save(model, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = str(failed.value)
    assert f"{tmp_path / 'model'} cannot be written: File too large" in told
    assert "free, about" in told
    assert "step-00000007" in told
    assert (tmp_path / "model" / "mine.txt").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "checkpoints"}


SUMMARY = {"steps": 40, "accuracy_before": 0.25, "accuracy_after": 0.75}
DIGEST = "0123456789abcdef" * 4


def config(**changes: Any) -> RunConfig:
    given = {
        "model": {"path": "/home/ada/models/base"},
        "data": {"path": "/data/sets/train.jsonl"},
        "evaluation": {"path": "/data/sets/heldout.jsonl"},
        "rewards": ["exact", {"path": "/home/ada/rewards.py:short", "weight": 0.5}],
        "output_dir": "/scratch/ada/adder",
        **changes,
    }
    return RunConfig.model_validate(given)


def rows(card: str) -> dict[str, str]:
    cells = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def test_data_are_told_with_their_digest_and_metrics_with_their_value() -> None:
    fingerprints = {"data.path": DIGEST, "evaluation.path": f"9000 {DIGEST[::-1]}", "model.path": "f"}
    metrics = {"reward": 0.51234, "grad_norm": 1.0, "memory/peak_gib": 3.0, "evaluation/accuracy": 0.75}
    told = rows(model_card(config(), SUMMARY, fingerprints, metrics))
    assert told["data"] == "train.jsonl (sha256 0123456789abcdef)"
    assert told["evaluated on"] == "heldout.jsonl (sha256 fedcba9876543210)"
    assert (told["reward"], told["grad_norm"], told["evaluation/accuracy"]) == ("0.5123", "1", "0.75")
    assert "memory/peak_gib" not in told
    assert told["optimizer steps"] == "40"
    assert (told["accuracy before"], told["accuracy after"]) == ("0.2500", "0.7500")
    assert told["rewards"] == "exact (weight 1), short (weight 0.5)"
    assert (told["base model"], told["loss"]) == ("base", "dapo")


def test_the_run_file_is_whole_and_names_no_folder_of_this_machine() -> None:
    card = model_card(config(), SUMMARY)
    shown = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert shown["train"] == config().model_dump(mode="json")["train"]
    assert shown["data"]["path"] == "train.jsonl"
    assert shown["rewards"][1]["path"] == "rewards.py:short"
    for folder in ("/home", "/data", "/scratch"):
        assert folder not in card
    assert "# adder\n" in card
    # Without metrics there is no heading for them, and a secret of the config is no part of it.
    assert "## Metrics" not in card
    assert "## Run file" in card
    assert "\n\n\n" not in card
    assert "hush" not in model_card(config(generator={"name": "mine", "api_key": "hush"}), SUMMARY)


def test_a_model_given_in_python_is_no_name_on_the_hub() -> None:
    for path, named in (("(given in Python)", None), ("org/base", "org/base")):
        front = model_card(config(model={"path": path}), SUMMARY).split("---\n")[1]
        assert yaml.safe_load(front).get("base_model") == named


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


@pytest.mark.parametrize("repo", ["model", "a/b/c", "ada/mo del", "ada/-model", "ada/a..b", "", "ada/m.git"])
def test_a_name_of_a_repository_or_branch_that_the_hub_does_not_take(repo: str) -> None:
    [problem] = hub_problems(HubConfig(repo=repo))
    assert (problem.key, problem.given, problem.allowed) == ("hub.repo", repo, "user/name")
    assert [p.key for p in hub_problems(HubConfig(repo="org-1/Model_2.5-GRPO", revision=" "))] == [
        "hub.revision"
    ]
    assert [*hub_problems(HubConfig(repo="ada/model")), *hub_problems(None)] == []


def refused(repo: str = "ada/model") -> str:
    problem = problem_of(check_hub, HubConfig(repo=repo))
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
