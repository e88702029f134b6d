"""Whole runs with an environment: everything behind its episodes, and the same again after a kill."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
from support import processes
from support.frozen import frozen_in
from support.killing import assert_same, finish, kill_and_resume, random_steps
from support.run_files import completions_of, metrics_of, summary_of

HERE = Path(__file__).parent
QUICKSTART = str(resources.files("grpox.runfile.recipes") / "quickstart" / "model")
EPISODES = [
    "environment={path: 'own_environments.py:Sums', weight: 2.0}",
    "rewards=[environment, {path: 'own_environments.py:read', weight: -0.1}]",
    "episodes={max_turns: 4, max_turn_tokens: 3}",
    *("sampling.max_completion_length=14", "tracking={}", "train.per_device_train_batch_size=16"),
    *("train.num_generations=8", "train.learning_rate=1.0e-3", "train.mask_truncated_completions=true"),
    *("train.max_steps=6", "checkpoint.every=1", "logging.save_completions_every=1"),
]
TURNS = [
    *EPISODES,
    *("episodes.isolation=none", "advantage=gigpo", "train.num_iterations=2", "train.steps_per_generation=2"),
    *("train.gradient_accumulation_steps=1", "train.dynamic_sampling_rounds=1"),
    "evaluation={path: data/held-out.jsonl, every: 3, accuracy: environment, "
    "early_stop: {metric: success, patience: 5}}",
]
STALE = [
    *EPISODES,
    *("generator={path: 'own_environments.py:Ahead'}", "advantage=return-to-go", "train.max_staleness=1"),
    *("correction=token-truncate", "evaluation=null"),
]


def check_episodes(run: Path) -> None:
    """Check that the record of a run shows its episodes."""
    rows = completions_of(run, 1)
    calls = [call for row in rows for call in json.loads(row["tool_calls"])]
    steps = metrics_of(run)
    assert sum(call["name"] == "add" for call in calls) == steps[0]["tools/add/calls"] > 0
    assert steps[0]["turns/mean"] == sum(len(json.loads(row["turns"])) for row in rows) / len(rows)
    assert {row["finish_reason"] for row in rows} > {"done"}
    for row in rows:
        roles = [message["role"] for message in json.loads(row["messages"])]
        assert roles.count("assistant") == len(json.loads(row["turns"]))
        parts = json.loads(row["environment_rewards"])
        assert row["rewards/environment"] == pytest.approx(2 * sum(parts.values()))  # by its weight
        assert row["rewards/read"] == len(json.loads(row["tool_calls"]))
        assert row["model_length"] < row["completion_length"] or len(roles) < 3
    assert steps[0]["rewards/environment/mean"] == pytest.approx(
        steps[0]["rewards/environment/sevens"] + steps[0]["rewards/environment/turns"]
    )


def check_results(run: Path) -> None:
    """Check what evaluations say of success, and of other entries of the info."""
    summary = summary_of(run)
    first, *_, last = metrics_of(run, "evaluation")
    for name, metric in (("success", "success"), ("late", "info/late"), ("accuracy", "accuracy")):
        assert (summary[f"{name}_before"], summary[f"{name}_after"]) == (first[metric], last[metric])
    answers = frozen_in((run / "report.html").read_text())["answers"]
    assert "success" in [tile[0] for tile in answers["run"][run.name]["tiles"]]
    rows = answers["completions"][run.name]["rows"]
    assert "tool add" in {who for row in rows for who, _ in row["messages"]}


def check_evaluation(run: Path, folder: Path) -> None:
    """Check that the model of the beginning, evaluated alone, has the success that the run found first."""
    takes_part = ("environment=", "rewards=", "episodes=", "sampling.", "evaluation=")
    settings = [each for each in TURNS if each.startswith(takes_part)]
    done = processes.run(
        *("-m", "grpox", "eval", QUICKSTART, "quickstart", *settings, "--out", "figures.json"), cwd=folder
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((folder / "figures.json").read_text())["metrics"]
    first = metrics_of(run, "evaluation")[0]
    assert {name: figures[name] for name in ("success", "turns/mean", "info/late")}.items() <= first.items()


@pytest.mark.parametrize("settings", [TURNS, STALE], ids=["turns", "stale"])
def test_a_killed_run_with_an_environment_goes_on_bit_by_bit(tmp_path: Path, settings: list[str]) -> None:
    shutil.copy(HERE / "own_environments.py", tmp_path)
    (tmp_path / "data").mkdir()
    sums = [{"prompt": f"{n}+{n + 3}=", "answer": str(2 * n + 3)} for n in range(20)]
    (tmp_path / "data" / "held-out.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))
    whole = tmp_path / "runs" / "whole"
    finish(tmp_path, "quickstart", *settings, "output_dir=runs/whole")
    check_episodes(whole)
    if settings is TURNS:
        check_results(whole)
        check_evaluation(whole, tmp_path)
    killed = kill_and_resume(tmp_path, "quickstart", *settings, steps=random_steps(2, 5), pause=0.05)
    assert_same(whole, killed)
