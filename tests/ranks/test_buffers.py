"""Buffers that a checkpoint holds, as they are now: to generators, into files and back, on one rank and two."""

from __future__ import annotations

from typing import Any

import pytest
from buffer_steps import WAYS
from rank_scripts import run_script


@pytest.fixture(scope="module", params=[1, 2])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import torch

    folder = tmp_path_factory.mktemp("buffers")
    run_script("buffer_steps.py", folder, folder=folder, ranks=request.param)
    return {way: torch.load(folder / f"{way}.pt") for way in WAYS}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["streamed", "saved", "resumed", "exported", "made whole"])
def test_they_are_those_that_the_engine_has_now(results: dict[str, Any], way: str, where: str) -> None:
    found = results[way]
    assert len(found["changed"]) == 2
    for name, value in found["changed"].items():
        assert float(abs(value - found["at first"][name])) > 0.2
        assert float(found[where][name]) == float(value)


def test_they_are_taken_to_another_number_of_ranks(results: dict[str, Any]) -> None:
    found = results["all weights"]
    assert found["universal"] == found["changed"]


def test_the_reference_moves_towards_them_and_is_kept(results: dict[str, Any]) -> None:
    found = results["all weights"]
    for name, value in found["reference"].items():
        assert float(value) == pytest.approx(float(found["at first"][name] + found["changed"][name]) / 2)
    assert found["reference read"] == found["reference"]
