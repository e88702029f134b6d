"""Batches that teach nothing: the loss is 0, no weight moves, and no metric is NaN."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from rank_scripts import results_of
from step_cases import CASES, EMPTY, STEPS
from support.fixtures import GrpoxCommand

LOSSES = [*STEPS, ("grpo", 0.1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """On two ranks: (loss, beta) -> case -> metrics of two steps, and the weights that changed."""
    return results_of("degenerate_steps.py", folder=tmp_path_factory.mktemp("degenerate"), ranks=2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss[0]}-beta{loss[1]}")
def test_a_step_that_teaches_nothing_has_no_nan_and_changes_no_weight_but_by_the_kl(
    results: Any, loss: tuple[str, float], case: str
) -> None:
    made = results[loss][case]
    pulled = loss[1] > 0 and case not in EMPTY
    assert pulled or made["changed"] == []
    for metrics in made["metrics"]:
        assert pulled or (metrics["loss"], metrics["grad_norm"]) == (0, 0)
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
        # Means over no token are left out, not 0 and not NaN.
        assert ("entropy" in metrics, "ratio/mean" in metrics) == (case not in EMPTY, case not in EMPTY)


@pytest.mark.parametrize("case", sorted(CASES.keys() - EMPTY.keys()))
def test_without_advantages_the_loss_is_the_kl_alone(results: Any, case: str) -> None:
    for metrics in results["dapo", 0.1][case]["metrics"]:
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
RUNS = {
    "rewards all equal, one group, EOS at once": (
        "rewards=[{path: mine.py:same}] generator={path: mine.py:Ends}",
        "train.num_generations=16 train.per_device_train_batch_size=16 loss=grpo",
        {
            "reward": 0.5,
            "reward_std": 0,
            "frac_reward_zero_std": 1,
            "completions/mean_length": 1,
            "completions/clipped_ratio": 0,
        },
        set(),
    ),
    "rewards all abstained": (
        "rewards=[{path: mine.py:abstains}]",
        "train.per_device_train_batch_size=16",
        {"rewards/abstains/abstained": 1, "frac_reward_zero_std": 1},
        {"reward", "reward_std", "rewards/abstains/mean"},
    ),
    "every completion cut and masked": (
        "generator={path: mine.py:Cut}",
        "train.per_device_train_batch_size=16 train.mask_truncated_completions=true loss=bnpo",
        {"completions/max_length": 1, "completions/clipped_ratio": 1, "reward": 0},
        {"entropy", "completions/mean_terminated_length", "ratio/mean", "sampling/ratio_mean"},
    ),
}
"""Name -> components, further overrides, metrics of each step, metrics that have no value."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_learns_nothing_ends_well_with_the_weights_it_began_with(
    grpox: GrpoxCommand, folder: Path, name: str
) -> None:
    import torch
    from safetensors.torch import load_file

    (folder / "mine.py").write_text(MINE)
    components, rest, expected, absent = RUNS[name]
    short = ("evaluation=null", "tracking={}", "train.max_steps=2", "train.warmup_steps=0")
    run = folder / "runs" / name
    done = grpox(
        "train",
        "quickstart",
        *short,
        *components.replace("] ", "]\n").split("\n"),
        *rest.split(),
        f"output_dir={run}",
    )
    assert done.returncode == 0, done.stderr
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)["metrics"]
        assert {key: metrics[key] for key in expected} == expected
        assert not absent & metrics.keys()
        assert all(math.isfinite(float(value)) for value in metrics.values())
        assert (metrics["loss"], metrics["grad_norm"]) == (
            pytest.approx(0, abs=1e-7),
            pytest.approx(0, abs=1e-7),
        )
    base = load_file(
        str(resources.files("grpox.runfile.recipes") / "quickstart" / "model" / "model.safetensors")
    )
    trained = load_file(run / "model" / "model.safetensors")
    assert [key for key in base if not torch.equal(base[key], trained[key])] == []
