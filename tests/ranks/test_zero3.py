"""The gradient of a real ZeRO-3 step is the same for every split into micro-batches and ranks."""

import pytest
from rank_scripts import results_of

LOSSES = [("grpo", 0.0), ("dr_grpo", 0.0), ("dapo", 0.1), ("cispo", 0.0), ("sapo", 0.1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The 24 rows of a step as one micro-batch, as four, and the same four on two ranks, and as eight there."""
    folder = tmp_path_factory.mktemp("zero3")
    one = results_of("zero3_step.py", "24x1", "6x4", folder=folder)
    two = results_of("zero3_step.py", "6x2", "3x4", folder=folder, ranks=2)
    return {
        "whole": one["24x1"], "four": one["6x4"], "two ranks": two["6x2"], "two ranks, eight": two["3x4"]
    }  # fmt: skip


def relative_difference(one, other):
    import torch

    one, other = (torch.cat([g.flatten().double() for g in r["gradient"].values()]) for r in (one, other))
    return float((one - other).norm() / one.norm())


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss[0])
@pytest.mark.parametrize("split", ["four", "two ranks", "two ranks, eight"])
def test_gradient_of_every_split_is_that_of_the_whole_step(results, loss, split):
    import torch

    whole, parts = results["whole"][loss], results[split][loss]
    assert relative_difference(whole, parts) < 2e-6
    for name in ("loss", "grad_norm", "entropy"):
        assert parts["metrics"][name] == pytest.approx(whole["metrics"][name], rel=1e-5, abs=1e-7)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(parts["weights"][name], weight, atol=1e-5, rtol=0)


def test_bnpo_is_the_same_on_two_ranks_for_the_same_micro_batches_only(results):
    key = ("bnpo", 0.0)
    assert relative_difference(results["four"][key], results["two ranks"][key]) < 2e-6
    assert relative_difference(results["four"][key], results["whole"][key]) > 1e-3


def test_parameters_really_are_partitioned_on_two_ranks(results):
    assert all(step["largest_shard"] <= 0.51 for step in results["two ranks"].values())


def test_first_pass_ratio_is_exactly_one(results):
    for split in results.values():
        for step in split.values():
            metrics = step["metrics"]
            assert (metrics["ratio/min"], metrics["ratio/max"], metrics["kl_old"]) == (1, 1, 0)
