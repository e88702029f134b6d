"""Batches that teach nothing: the loss is 0, no weight moves, and no metric is NaN."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from rank_scripts import results_of
from step_cases import CASES, EMPTY, STEPS
from support.killing import finish
from support.run_files import SHORT, metrics_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """On two ranks: (loss, beta) -> case -> metrics of two steps, and the weights that changed."""
    return results_of("degenerate_steps.py", folder=tmp_path_factory.mktemp("degenerate"), ranks=2)


@pytest.mark.parametrize("loss", STEPS, ids=str)
def test_a_step_that_teaches_nothing_has_no_nan_and_changes_no_weight_but_by_the_kl(
    results: Any, loss: tuple[str, float]
) -> None:
    for case in CASES:
        made, pulled = results[loss][case], loss[1] > 0 and case not in EMPTY
        assert pulled or made["changed"] == [], case
        for metrics in made["metrics"]:
            assert pulled or (metrics["loss"], metrics["grad_norm"]) == (0, 0), case
            assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
            # Means over no token are left out, not 0 and not NaN.
            has_tokens = case not in EMPTY
            assert ("entropy" in metrics, "ratio/mean" in metrics) == (has_tokens, has_tokens)
            if loss == ("dapo", 0.1) and has_tokens:  # without advantages the loss is the KL alone
                assert metrics["loss"] == pytest.approx(0.1 * metrics["kl"], rel=1e-4)
                assert metrics["kl"] > 0


MINE = """
from dataclasses import replace
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator

def same(completions, **columns):
    return [0.5] * len(completions)

def abstains(completions, **columns):
    return [None] * len(completions)

class Ends(HfGenerator):
    '''EOS at once.'''
    provides = ("logprobs",)
    reason = "stop"
    def __init__(self):
        super().__init__(HfConfig())
    def start(self, context):
        self.eos = context.stop_token_ids[:1]
        super().start(context)
    def generate(self, prompts, sampling, seed):
        for rollout in super().generate(prompts, sampling, seed):
            yield replace(rollout, completion_ids=self.eos, sampler_logprobs=(-1.0,), finish_reason=self.reason)

class Cut(Ends):
    reason = "length"
"""
CUT = "completions/clipped_ratio"
RUNS: dict[str, tuple[list[str], dict[str, float], set[str]]] = {
    "rewards all equal, one group, EOS at once": (
        ["rewards=[{path: mine.py:same}]", "generator={path: mine.py:Ends}", "loss=grpo"],
        {"reward": 0.5, "reward_std": 0, "frac_reward_zero_std": 1, "completions/mean_length": 1, CUT: 0},
        set(),
    ),
    "rewards all abstained": (
        ["rewards=[{path: mine.py:abstains}]"],
        {"rewards/abstains/abstained": 1, "frac_reward_zero_std": 1},
        {"reward", "reward_std", "rewards/abstains/mean"},
    ),
    "every completion cut and masked": (
        ["generator={path: mine.py:Cut}", "train.mask_truncated_completions=true", "loss=bnpo"],
        {"completions/max_length": 1, CUT: 1, "reward": 0},
        {"entropy", "completions/mean_terminated_length", "ratio/mean", "sampling/ratio_mean"},
    ),
}
"""Name -> settings, metrics of each step, metrics that have no value."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_learns_nothing_ends_well_with_the_weights_it_began_with(tmp_path: Path, name: str) -> None:
    import torch
    from safetensors.torch import load_file

    (tmp_path / "mine.py").write_text(MINE)
    settings, expected, absent = RUNS[name]
    short = (*SHORT, "train.max_steps=2", "train.warmup_steps=0", "train.per_device_train_batch_size=16")
    finish(tmp_path, "quickstart", *short, *settings, "output_dir=run")
    for metrics in metrics_of(tmp_path / "run"):
        assert {key: metrics[key] for key in expected} == expected
        assert not absent & metrics.keys()
        assert all(math.isfinite(float(value)) for value in metrics.values())
        assert max(abs(metrics["loss"]), abs(metrics["grad_norm"])) < 1e-7
    recipe = resources.files("grpox.runfile.recipes") / "quickstart"
    base = load_file(str(recipe / "model" / "model.safetensors"))
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert [key for key in base if not torch.equal(base[key], trained[key])] == []
