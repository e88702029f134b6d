"""Options of the update in whole runs: a reference that follows, completions that are all truncated."""

import json
import math

import pytest
from pyarrow import parquet

from grpox.observing.token_files import has_tokens, read_tokens

SHORT = ("evaluation=null", "tracking={}", "train.warmup_steps=0", "logging.completions_every=0")


def metrics(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record["metrics"] for record in map(json.loads, lines) if "metrics" in record]


def train(grpox, folder, name, *overrides, ranks=1):
    done = grpox("train", "quickstart", *SHORT, f"output_dir=runs/{name}", *overrides, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return metrics(folder, name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_whose_completions_are_all_truncated_changes_nothing(grpox, folder, ranks):
    steps = train(
        grpox,
        folder,
        f"truncated-{ranks}",
        "train.max_steps=2",
        "train.mask_truncated_completions=true",
        "train.beta=0.1",
        "sampling.max_completion_length=2",
        "sampling.min_completion_length=2",  # no EOS before: every completion is cut off
        "train.per_device_train_batch_size=64",
        ranks=ranks,
    )
    assert [step["completions/clipped_ratio"] for step in steps] == [1, 1]
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [(0, 0), (0, 0)]
    assert all(math.isfinite(float(value)) for step in steps for value in step.values())


def test_a_reference_that_is_replaced_after_every_step_is_the_policy(grpox, folder):
    sync = ("train.max_steps=3", "train.beta=0.1", "train.kl=unbiased", "train.ref_sync_steps=1")
    follows = train(grpox, folder, "follows", *sync, "train.sync_ref_model=true", "train.ref_sync_alpha=1")
    assert all(abs(step["kl"]) < 1e-9 for step in follows)  # the two engines' forwards differ by roundings
    stays = train(grpox, folder, "stays", *sync)
    assert abs(stays[0]["kl"]) < 1e-9
    assert all(step["kl"] > 1e-6 for step in stays[1:])


def test_the_ratio_is_to_what_the_generator_reported_if_the_run_says_so(grpox, folder):
    """Two steps of each generation batch; hf's probabilities are the trainer's but for roundings."""
    two = ("train.max_steps=4", "train.steps_per_generation=2", "train.per_device_train_batch_size=64")
    policy = train(grpox, folder, "of-policy", *two)
    generator = train(grpox, folder, "of-generator", *two, "train.old_logprobs=generator")
    assert [step["sampling/difference_max"] for step in generator] == [0, 0, 0, 0]
    assert policy[0]["sampling/difference_max"] > 0
    for one, other in zip(policy, generator, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert other["ratio/mean"] == pytest.approx(one["ratio/mean"], abs=1e-4)


def test_a_deterministic_run_on_a_cpu_is_the_run_that_it_was(grpox, folder):
    def bits(name, *overrides):
        two = ("train.max_steps=2", "train.beta=0.1", "train.per_device_train_batch_size=64")
        timed = ("time/", "step_time", "tokens_per_second/", "memory/")
        steps = train(grpox, folder, name, *two, *overrides, ranks=2)
        weights = (folder / "runs" / name / "model" / "model.safetensors").read_bytes()
        return weights, [{n: v for n, v in step.items() if not n.startswith(timed)} for step in steps]

    # The record of tokens changes no bit either.
    assert bits("deterministic", "train.deterministic=true", "record.tokens=0") == bits("plain")
    deterministic, plain = folder / "runs" / "deterministic", folder / "runs" / "plain"
    assert not (deterministic / "tokens").exists()
    for step in (1, 2):
        of_step = parquet.read_table(plain / "completions" / f"step_{step:06d}.parquet").to_pylist()
        rows = {(row["group"], row["sample"]): row for row in of_step}
        keys = [key for key in rows if has_tokens(plain, step, *key)]
        assert len(keys) == 8
        halves = {row["group"] * 16 + row["sample"] < 64 for key, row in rows.items() if key in keys}
        assert halves == {False, True}  # each rank has trained on some of them
        rewards = [row["reward"] for row in of_step]
        assert {min(rewards), max(rewards)} <= {rows[key]["reward"] for key in keys}
        for key in keys:
            tokens = read_tokens(plain, step, *key)
            assert "".join(token["text"] for token in tokens) == rows[key]["completion"]
            assert len(tokens) == rows[key]["completion_length"]
            for token in tokens:
                assert token["advantage"] == pytest.approx(rows[key]["advantage"])
                assert (token["ratio"], token["mask"], token["turn"]) == (1, 1, 0)  # one step a batch
                assert token["policy_logprob"] == pytest.approx(token["logprob"], abs=1e-4)
                assert token["entropy"] > 0
