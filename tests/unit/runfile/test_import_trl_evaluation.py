"""Conversion of TRL's evaluations and best model by `grpox import-trl`."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpox.runfile.from_trl.convert import convert
from grpox.runfile.from_trl.draft import Draft, run_file_text
from grpox.runfile.from_trl.fields import Verdict
from grpox.runfile.from_trl.setup import read_trl_yaml

BASE = "model_name_or_path: org/model\ndataset_name: org/data\nreward_funcs: [mine.accuracy_reward]\n"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def accuracy_reward(completions, **_): ...\n")


def drafted(text: str) -> Draft:
    return convert(read_trl_yaml(BASE + text, "grpo.yaml"), Path())


def row(draft: Draft, name: str) -> tuple[Verdict, str]:
    [found] = [row for row in draft.rows if row.name == name]
    return found.verdict, found.message


def test_completions_of_each_prompt_are_sampled_as_trl_samples_them() -> None:
    draft = drafted("eval_strategy: steps\neval_steps: 7\nnum_generations_eval: 4\ntemperature: 0.7\n")
    line = "# evaluation: {path: held-out.jsonl, every: 7, num_generations: 4, temperature: 0.7}\n"
    assert line in run_file_text(draft)
    verdict, told = row(draft, "num_generations_eval")
    assert (verdict, told.partition(":")[0]) == (Verdict.DIFFERS, "evaluation.num_generations")


def test_without_evaluations_their_number_is_not_needed() -> None:
    assert row(drafted("num_generations_eval: 4\n"), "num_generations_eval")[0] is Verdict.NOT_NEEDED


@pytest.mark.parametrize(
    ("metric", "ours"),
    [
        ("reward", "evaluation/reward"),
        ("eval_reward", "evaluation/reward"),
        ("eval_rewards/accuracy_reward/mean", "evaluation/rewards/accuracy_reward/mean"),
        ("completions/mean_length", "evaluation/completions/mean_length"),
    ],
)
def test_the_best_model_is_chosen_by_an_evaluation(metric: str, ours: str) -> None:
    text = f"eval_strategy: steps\nload_best_model_at_end: true\nmetric_for_best_model: {metric}\n"
    draft = drafted(f"{text}greater_is_better: false\n")
    assert f"\n  # best: {ours}\n" in run_file_text(draft)
    assert draft.values["checkpoint"]["best_is"] == "lowest"
    assert row(draft, "metric_for_best_model") == (Verdict.SAME, f"checkpoint.best: {ours}")


@pytest.mark.parametrize("metric", ["loss", "eval_rewards/other/mean"])
def test_a_metric_that_grpox_has_not_is_asked_for(metric: str) -> None:
    text = f"eval_strategy: steps\nload_best_model_at_end: true\nmetric_for_best_model: {metric}\n"
    written = run_file_text(drafted(text))
    assert "\n# checkpoint: {best: evaluation/reward}\n" in written
    assert f"TRL has {metric.removeprefix('eval_')}" in written
