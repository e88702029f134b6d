"""Rollouts used for several steps, on two ranks, with a reference and a correction: what a run makes of it."""

import json

import pytest

SETTINGS = (
    "train.max_steps=5",
    "train.per_device_train_batch_size=16",
    "train.gradient_accumulation_steps=2",
    "train.steps_per_generation=4",
    "train.num_iterations=2",
    "train.num_generations=8",
    "train.beta=0.1",
    "train.learning_rate=0.001",
    "train.lr_scheduler_type=constant",
    "train.warmup_steps=0",
    "loss=grpo",
    "correction=token-truncate",
    "evaluation=null",
    "tracking={}",
    "output_dir=runs/reuse",
)


@pytest.fixture(scope="module")
def metrics(grpox, folder):
    done = grpox("train", "quickstart", *SETTINGS, ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (folder / "runs" / "reuse" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["metrics"] for line in map(json.loads, lines)}


def test_a_generation_batch_serves_four_steps(metrics):
    """steps_per_generation 4 * num_iterations 2 / gradient_accumulation_steps 2 = 4."""
    assert [step for step, m in metrics.items() if "time/generate" in m] == [1, 5]


def test_only_the_first_step_on_fresh_rollouts_is_on_policy(metrics):
    on_policy = [step for step, m in metrics.items() if m["kl_old"] == 0]
    assert on_policy == [1, 5]
    for step in (2, 3, 4):
        low, high = metrics[step]["ratio/min"], metrics[step]["ratio/max"]
        assert low < high  # of micro-batch means, which may all be on one side of 1
        assert 1 not in (low, high)


def test_old_logprobs_are_those_of_the_policy_that_sampled(metrics):
    """pi_old of slices first trained on in step 2 was fixed before step 1: it still agrees with mu."""
    assert all(m["sampling/difference_max"] < 1e-4 for m in metrics.values())


def test_kl_to_the_reference_starts_at_zero(metrics):
    assert metrics[1]["kl"] == pytest.approx(0, abs=1e-9)
    assert all(metrics[step]["kl"] > 1e-3 for step in (2, 3, 4, 5))


def test_no_completion_file_is_lost_and_none_is_doubled(metrics, folder):
    files = sorted(p.name for p in (folder / "runs" / "reuse" / "completions").iterdir())
    assert files == ["step_000001.parquet", "step_000005.parquet"]
