"""Steps on real ZeRO-3 with packed sequences, and of mixed samples: one gradient, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
from rank_scripts import relative_difference, results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The same 24 rows by number of ranks."""
    folder = tmp_path_factory.mktemp("packed")
    return {ranks: results_of("packed_steps.py", folder=folder, ranks=ranks) for ranks in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("case", "plain"),
    [
        ("packed", "plain"),
        ("packed, checkpointing", "plain"),
        ("packed, a budget", "plain"),
        ("shared", "plain"),
        ("first trial fails", "plain"),
        ("adapters, packed", "adapters, plain"),
    ],
)
def test_every_mode_has_the_gradient_of_all_logits_of_padded_sequences(
    results: dict[int, Any], ranks: int, case: str, plain: str
) -> None:
    whole, parts = results[1][plain], results[ranks][case]
    assert relative_difference(whole["gradients"], parts["gradients"]) < 3e-6
    for name in ("loss", "grad_norm", "entropy"):
        assert parts["metrics"][name] == pytest.approx(whole["metrics"][name], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_modes_are_those_that_the_run_names(results: dict[int, Any], ranks: int) -> None:
    packed = {"chunked": True, "packed": True, "by_lengths": True, "shared_width": 0, "failures": ()}
    for case in ("packed", "packed, checkpointing", "packed, a budget"):
        assert results[ranks][case]["mode"] == packed, case
        assert results[ranks][case]["metrics"]["padding_fraction"] == 0
        assert results[ranks][case]["unused"] == [None] * ranks
    assert results[ranks]["packed"]["of the reference"] == packed
    assert results[ranks]["adapters, packed"]["mode"] == packed
    assert results[ranks]["shared"]["mode"]["shared_width"] == 128


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_within_the_first_trial_is_told_and_leaves_a_working_engine(
    results: dict[int, Any], ranks: int
) -> None:
    broken = results[ranks]["first trial fails"]
    assert (broken["mode"]["chunked"], broken["mode"]["shared_width"]) == (True, 0)
    for rank, reason in enumerate(broken["unused"]):
        raised = f"raised RuntimeError: rank {rank} has no such mask"
        assert f"the trial of train.prefix_sharing with sdpa {raised}" in reason


def test_ranks_that_pack_mixed_samples_differently_take_the_steps_of_one(results: dict[int, Any]) -> None:
    """Ranks whose collectives differ would wait until they are killed."""
    one, two = results[1]["mixed"], results[2]["mixed"]
    assert len(set(two["micro-batches"])) == 2
    for step, (whole, parts) in enumerate(zip(one["gradients"], two["gradients"], strict=True)):
        assert relative_difference(whole, parts) < 1e-5, step
    for whole, parts in zip(one["metrics"], two["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl", "kl_old"):
            assert parts[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-7), name
    # Every sample has pi_old and a reference after the first step.
    assert (one["lacks"], two["lacks"]) == ([0], [0, 0])
    first, second = one["metrics"]
    assert first["kl_old"] > 0  # of the rows that were trained on before
    assert second["kl"] != first["kl"]
