"""Entropy bonus and masks of the policy loss on real ZeRO-3: the same gradient on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
from rank_scripts import results_of
from test_zero3 import relative_difference

SCRIPT = "zero3_policy_terms.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The 24 rows of a step as one micro-batch, and as eight on two ranks, which torchrun really starts."""
    folder = tmp_path_factory.mktemp("policy-terms")
    return {
        "whole": results_of(SCRIPT, "24x1", folder=folder),
        "two ranks": results_of(SCRIPT, "3x4", folder=folder, ranks=2, cold=True),
    }


@pytest.mark.parametrize("name", ["all", "plain forward"])
def test_two_ranks_take_the_step_of_one(results: dict[str, Any], name: str) -> None:
    whole, parts = results["whole"][name], results["two ranks"][name]
    assert relative_difference(whole, parts) < 2e-6
    assert whole["metrics"].keys() == parts["metrics"].keys()
    for metric in ("loss", "grad_norm", "entropy"):
        assert parts["metrics"][metric] == pytest.approx(whole["metrics"][metric], rel=1e-5, abs=1e-7)


def test_what_is_left_out_is_the_same_on_two_ranks(results: dict[str, Any]) -> None:
    whole, parts = (results[split]["all"]["metrics"] for split in ("whole", "two ranks"))
    for metric in ("off_policy_masked", "top_entropy/kept", "top_entropy/threshold"):
        assert parts[metric] == pytest.approx(whole[metric], rel=1e-5)
    assert 0 < whole["off_policy_masked"] < 0.5
    assert whole["top_entropy/kept"] == pytest.approx(0.3, abs=0.02)


def test_the_gradient_of_the_entropy_is_the_same_from_hidden_states_as_from_logits(
    results: dict[str, Any],
) -> None:
    whole = results["whole"]
    assert relative_difference(whole["all"], whole["plain forward"]) < 1e-5
