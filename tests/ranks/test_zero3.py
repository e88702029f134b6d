"""The gradient of a real ZeRO-3 step is the same for every split into micro-batches and ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("zero3_step.py")
LOSSES = [("grpo", 0.0), ("dr_grpo", 0.0), ("dapo", 0.1), ("cispo", 0.0), ("sapo", 0.1)]


def take_steps(folder, ranks, batch_size, accumulation, script=SCRIPT):
    out = folder / f"{ranks}x{batch_size}x{accumulation}.pt"
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(script), str(out), str(batch_size), str(accumulation)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The 24 rows of a step as one micro-batch, as four, and the same four on two ranks, and as eight there."""
    folder = tmp_path_factory.mktemp("zero3")
    splits = {"whole": (1, 24, 1), "four": (1, 6, 4), "two ranks": (2, 6, 2), "two ranks, eight": (2, 3, 4)}
    return {name: take_steps(folder, *split) for name, split in splits.items()}


def relative_difference(one, other):
    one, other = (torch.cat([g.flatten().double() for g in r["gradient"].values()]) for r in (one, other))
    return float((one - other).norm() / one.norm())


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss[0])
@pytest.mark.parametrize("split", ["four", "two ranks", "two ranks, eight"])
def test_gradient_of_every_split_is_that_of_the_whole_step(results, loss, split):
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


def test_kl_to_the_reference_is_reported_only_with_a_reference(results):
    for (_, beta), step in results["whole"].items():
        assert ("kl" in step["metrics"]) == (beta > 0)
