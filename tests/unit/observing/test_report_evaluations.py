"""Evaluations in the report: curves, rewards, and the reason of an early stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpox.observing.report.charts import charts_of
from grpox.observing.report.data import RunRecord, read_record
from grpox.observing.report.page import render


def record_of(folder: Path, **summary: Any) -> RunRecord:
    """Three evaluations around a step, with a reward that training has not."""
    lines = [{"step": 1, "time": 1.0, "metrics": {"reward": 0.5, "rewards/form/mean": 0.5}}]
    for step, accuracy in ((0, 0.2), (1, 0.4)):
        values = {"accuracy": accuracy, "pass_at_1": accuracy, "pass_at_8": 0.75, "rewards/math/mean": accuracy}
        lines.append({"step": step, "time": 1.0, "evaluation": values})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"steps": 1, "train_seconds": 1.0, **summary}))
    own = "evaluation: {path: h.jsonl, rewards: [{name: math, column: gold}]}\nrewards: [{name: form}]\n"
    (folder / "config.yaml").write_text(own)
    return read_record(folder)


def test_pass_at_k_and_rewards_of_evaluations_alone_have_their_charts(tmp_path: Path) -> None:
    charts = {chart.title: chart.metrics for chart in charts_of(record_of(tmp_path))}
    assert charts["Pass@k"] == {"1": "pass_at_1", "8": "pass_at_8"}
    assert charts["Reward: math"] == {"mean": "rewards/math/mean"}
    assert "Reward: form" in charts
    assert list(charts)[:2] == ["Accuracy", "Pass@k"]


def test_the_page_tells_why_a_run_stopped_early(tmp_path: Path) -> None:
    assert "Stopped early" not in render(record_of(tmp_path))
    stopped = {"step": 1, "metric": "evaluation/accuracy", "best": 0.4, "best_step": 1}
    text = render(record_of(tmp_path, stopped_early=stopped | {"evaluations_without_gain": 3}))
    for fact in ("Stopped early after step 1", "evaluation/accuracy was best after step 1, at 0.4"):
        assert fact in text
    assert "evaluations since then: 3." in text


def test_the_rewards_of_evaluations_are_among_the_components(tmp_path: Path) -> None:
    text = render(record_of(tmp_path))
    assert "<td>reward of evaluations</td><td><code>math</code></td><td>column: gold</td>" in text
    assert "<td>reward</td><td><code>form</code></td>" in text
