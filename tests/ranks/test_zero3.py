"""A real ZeRO-3 step is the same for every split into micro-batches and ranks: gradient and statistics."""

import pytest
import torch
from rank_scripts import relative_difference, results_of
from step_cases import STEPS

LOSSES = [(loss, beta) for loss, beta in STEPS if loss != "bnpo"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The 24 rows of a step as one micro-batch, as four, and the same four on two ranks, and as eight there."""
    folder = tmp_path_factory.mktemp("zero3")
    one = results_of("zero3_step.py", "24x1", "6x4", folder=folder)
    two = results_of("zero3_step.py", "6x2", "3x4", folder=folder, ranks=2)
    return {
        "whole": one["24x1"], "four": one["6x4"], "two ranks": two["6x2"], "two ranks, eight": two["3x4"]
    }  # fmt: skip


@pytest.mark.parametrize("step", [*LOSSES, "terms", "terms, plain forward"], ids=str)
@pytest.mark.parametrize("split", ["four", "two ranks", "two ranks, eight"])
def test_every_split_takes_the_whole_step(results, step, split):
    whole, parts = results["whole"][step], results[split][step]
    assert relative_difference(whole["gradient"], parts["gradient"]) < 2e-6
    assert whole["metrics"].keys() == parts["metrics"].keys()
    for name in ("loss", "grad_norm", "entropy"):
        assert parts["metrics"][name] == pytest.approx(whole["metrics"][name], rel=1e-5, abs=1e-7)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(parts["weights"][name], weight, atol=1e-5, rtol=0)


def test_bnpo_is_the_same_on_two_ranks_for_the_same_micro_batches_only(results):
    whole, four, two = (results[split]["bnpo", 0.0]["gradient"] for split in ("whole", "four", "two ranks"))
    assert relative_difference(four, two) < 2e-6
    assert relative_difference(four, whole) > 1e-3


def test_parameters_are_partitioned_and_the_first_ratio_is_exactly_one(results):
    assert all(step["largest_shard"] <= 0.51 for step in results["two ranks"].values())
    for step in (step for split in results.values() for step in split.values()):
        metrics = step["metrics"]
        assert (metrics["ratio/min"], metrics["ratio/max"], metrics["kl_old"]) == (1, 1, 0)


def test_masks_leave_out_the_same_on_every_split_and_the_entropy_has_one_gradient(results):
    whole = results["whole"]["terms"]
    for split in results.values():
        for metric in ("off_policy_masked", "top_entropy/kept", "top_entropy/threshold"):
            assert split["terms"]["metrics"][metric] == pytest.approx(whole["metrics"][metric], rel=1e-5)
    assert 0 < whole["metrics"]["off_policy_masked"] < 0.5
    assert whole["metrics"]["top_entropy/kept"] == pytest.approx(0.3, abs=0.02)
    plain = results["whole"]["terms, plain forward"]
    assert relative_difference(whole["gradient"], plain["gradient"]) < 1e-5


@pytest.mark.parametrize("loss", ["dapo", "sapo"])
def test_statistics_are_those_of_the_rows_in_their_order_on_every_split(results, loss):
    first = results["whole"][loss, 0.1]["statistics"]
    lengths = first["length", "gather"].long()
    assert (len(lengths), lengths.min()) == (24, 1)
    assert torch.equal(first["advantages", "gather"], first["advantage", "gather"].repeat_interleave(lengths))
    for split, steps in results.items():
        values, metrics = steps[loss, 0.1]["statistics"], steps[loss, 0.1]["metrics"]
        for (name, reduction), value in values.items():
            exact = name in ("advantages", "advantage", "length")
            torch.testing.assert_close(
                torch.as_tensor(value), torch.as_tensor(first[name, reduction]),
                rtol=0.0 if exact else 1e-5, atol=0.0 if exact else 1e-5, msg=f"{name} {reduction}, {split}",
            )  # fmt: skip
        for name in ("ratio", "kl_old", "kl", "entropy", "advantages"):
            assert len(values[name, "gather"]) == lengths.sum()
        for name in ("kl", "entropy"):
            assert values[name, "mean"] == pytest.approx(metrics[name], rel=1e-6)
