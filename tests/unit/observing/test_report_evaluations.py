"""Evaluations in the report: curves, rewards, and the reason of an early stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.frozen import answers_of


def run_folder(folder: Path, **summary: Any) -> Path:
    """Three evaluations around a step, with a reward that training has not."""
    lines = [{"step": 1, "time": 1.0, "metrics": {"reward": 0.5, "rewards/form/mean": 0.5}}]
    for step, accuracy in ((0, 0.2), (1, 0.4)):
        values = {"accuracy": accuracy, "pass_at_1": accuracy, "pass_at_8": 0.75, "rewards/math/mean": accuracy}
        lines.append({"step": step, "time": 1.0, "evaluation": values})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"steps": 1, "train_seconds": 1.0, **summary}))
    own = "evaluation: {path: h.jsonl, rewards: [{name: math, column: gold}]}\nrewards: [{name: form}]\n"
    (folder / "config.yaml").write_text(own)
    return folder


def test_pass_at_k_and_rewards_of_evaluations_alone_have_their_curves(tmp_path: Path) -> None:
    metrics = answers_of(run_folder(tmp_path))["metrics"]
    assert metrics["series"]["evaluation/pass_at_8"] == [[0, 1], [0.75, 0.75]]
    assert metrics["series"]["evaluation/rewards/math/mean"] == [[0, 1], [0.2, 0.4]]
    assert metrics["series"]["rewards/form/mean"] == [[1], [0.5]]
    names = [entry["name"] for entry in metrics["names"]]
    assert names[:2] == ["reward", "evaluation/accuracy"]
    flat = {entry["name"] for entry in metrics["names"] if entry["is_flat"]}
    assert flat == {"reward", "evaluation/pass_at_8", "rewards/form/mean"}


def test_the_page_tells_why_a_run_stopped_early(tmp_path: Path) -> None:
    assert answers_of(run_folder(tmp_path))["run"]["stopped_early"] == ""
    stopped = {"step": 1, "metric": "evaluation/accuracy", "best": 0.4, "best_step": 1}
    folder = run_folder(tmp_path, stopped_early=stopped | {"evaluations_without_gain": 3})
    text = answers_of(folder)["run"]["stopped_early"]
    for fact in ("after step 1", "evaluation/accuracy was best after step 1, at 0.4"):
        assert fact in text
    assert text.endswith("evaluations since then: 3")


def test_the_rewards_of_evaluations_are_among_the_components(tmp_path: Path) -> None:
    components = answers_of(run_folder(tmp_path))["run"]["components"]
    assert ["reward of evaluations", "math", "column: gold"] in components
    assert ["reward", "form", ""] in components
