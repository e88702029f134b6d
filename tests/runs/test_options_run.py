"""Options of the update in whole runs: a reference that follows, the generator's ratio, determinism, tokens."""

import pytest
from support.killing import OF_THIS_MACHINE, finish
from support.run_files import SHORT, completions_of, metrics_of

from grpox.observing.token_files import has_tokens, read_tokens

FEWER = ("train.warmup_steps=0", "logging.completions_every=0")


def train(folder, name, *overrides, ranks=1):
    finish(folder, "quickstart", *SHORT, *FEWER, f"output_dir=runs/{name}", *overrides, ranks=ranks)
    return metrics_of(folder / "runs" / name)


def test_a_reference_that_is_replaced_after_every_step_is_the_policy(folder):
    sync = ("train.max_steps=3", "train.beta=0.1", "train.kl=unbiased", "train.ref_sync_steps=1")
    follows = train(folder, "follows", *sync, "train.sync_ref_model=true", "train.ref_sync_alpha=1")
    assert all(abs(step["kl"]) < 1e-9 for step in follows)  # the two engines' forwards differ by roundings
    stays = train(folder, "stays", *sync)
    assert abs(stays[0]["kl"]) < 1e-9
    assert all(step["kl"] > 1e-6 for step in stays[1:])


def test_the_ratio_is_to_what_the_generator_reported_if_the_run_says_so(folder):
    """Two steps of each generation batch; hf's probabilities are the trainer's but for roundings."""
    two = ("train.max_steps=4", "train.steps_per_generation=2", "train.per_device_train_batch_size=64")
    policy = train(folder, "of-policy", *two)
    generator = train(folder, "of-generator", *two, "train.old_logprobs=generator")
    assert [step["sampling/difference_max"] for step in generator] == [0, 0, 0, 0]
    assert policy[0]["sampling/difference_max"] > 0
    for one, other in zip(policy, generator, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert other["ratio/mean"] == pytest.approx(one["ratio/mean"], abs=1e-4)


def test_a_deterministic_run_on_a_cpu_is_the_run_that_it_was(folder):
    def bits(name, *overrides):
        two = ("train.max_steps=2", "train.beta=0.1", "train.per_device_train_batch_size=64")
        steps = train(folder, name, *two, *overrides, ranks=2)
        weights = (folder / "runs" / name / "model" / "model.safetensors").read_bytes()
        return weights, [{n: v for n, v in step.items() if not n.startswith(OF_THIS_MACHINE)} for step in steps]

    # The record of tokens changes no bit either.
    assert bits("deterministic", "train.deterministic=true", "record.tokens=0") == bits("plain")
    deterministic, plain = folder / "runs" / "deterministic", folder / "runs" / "plain"
    assert not (deterministic / "tokens").exists()
    for step in (1, 2):
        of_step = completions_of(plain, step)
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
