"""Steps on real ZeRO-3 of samples of which some have pi_old and a reference: on two ranks as on one."""

from __future__ import annotations

from typing import Any

import pytest
from rank_scripts import results_of
from test_zero3 import relative_difference


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The same 24 rows by number of ranks. Ranks whose collectives differ would wait until they are killed."""
    folder = tmp_path_factory.mktemp("mixed")
    return {ranks: results_of("mixed_steps.py", folder=folder, ranks=ranks) for ranks in (1, 2)}


def test_two_ranks_that_pack_differently_take_the_steps_of_one(results: dict[int, Any]) -> None:
    one, two = results[1], results[2]
    assert len(set(two["micro-batches"])) == 2
    for step, (whole, parts) in enumerate(zip(one["gradients"], two["gradients"], strict=True)):
        assert relative_difference({"gradient": whole}, {"gradient": parts}) < 1e-5, step
    for whole, parts in zip(one["metrics"], two["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl", "kl_old"):
            assert parts[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-7), name


def test_every_sample_has_both_after_the_first_step(results: dict[int, Any]) -> None:
    assert (results[1]["lacks"], results[2]["lacks"]) == ([0], [0, 0])
    first, second = results[1]["metrics"]
    assert first["kl_old"] > 0  # of the rows that were trained on before
    assert second["kl"] != first["kl"]
