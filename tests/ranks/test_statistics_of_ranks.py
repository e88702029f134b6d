"""Statistics of a step do not depend on how its rows are split over micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_scripts import results_of

TOKENS = ("ratio", "kl_old", "kl", "entropy", "advantages")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Any]:
    """Ranks and split -> what `statistics_steps.py` saved of it."""
    folder = tmp_path_factory.mktemp("statistics")
    splits = {1: ("24x1", "8x3"), 2: ("12x1", "4x3")}
    return {
        (ranks, split): each
        for ranks, names in splits.items()
        for split, each in results_of("statistics_steps.py", *names, folder=folder, ranks=ranks).items()
    }


def test_every_split_has_the_same_values_in_row_order(results: dict[tuple[int, str], Any]) -> None:
    first = results[1, "24x1"]["values"]
    for (ranks, split), each in results.items():
        for (name, reduction), value in each["values"].items():
            expected = torch.as_tensor(first[name, reduction])
            what = f"{name} {reduction} on {ranks} ranks, {split}"
            exact = name in ("advantages", "advantage", "length")
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(torch.as_tensor(value), expected, **tolerance, msg=what)


def test_gathered_values_are_those_of_the_rollouts(results: dict[tuple[int, str], Any]) -> None:
    for each in results.values():
        values, lengths = each["values"], each["lengths"]
        assert values["length", "gather"].tolist() == lengths
        for name in TOKENS:
            assert len(values[name, "gather"]) == sum(lengths)
        repeated = torch.repeat_interleave(values["advantage", "gather"], torch.tensor(lengths))
        assert torch.equal(values["advantages", "gather"], repeated)


def test_the_mean_is_that_of_the_metrics(results: dict[tuple[int, str], Any]) -> None:
    for each in results.values():
        for name in ("kl", "entropy"):
            assert each["values"][name, "mean"] == pytest.approx(each["metrics"][name], rel=1e-6)
