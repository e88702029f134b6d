"""Buffers and a reference that follow the policy on one rank and two: to generators, into files and back."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
from rank_scripts import results_of

WAYS = ("all weights", "adapters")
SHARDS, WHOLE = 0, 1_000_000
"""Sizes up to which parameters stay whole on each rank."""


@pytest.fixture(scope="module", params=[1, 2])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("buffers")
    return results_of("buffer_steps.py", folder=folder, ranks=request.param) | {"ranks": request.param}


@pytest.mark.parametrize("way", WAYS)
def test_buffers_are_those_that_the_engine_has_now(results: dict[Any, Any], way: str) -> None:
    found = results[way]
    assert len(found["changed"]) == 2
    for name, value in found["changed"].items():
        assert float(abs(value - found["at first"][name])) > 0.2
        for where in ("streamed", "saved", "resumed", "exported", "made whole"):
            assert float(found[where][name]) == float(value), where


def test_buffers_reach_other_numbers_of_ranks_and_the_reference(results: dict[Any, Any]) -> None:
    found = results["all weights"]
    assert found["universal"] == found["changed"]
    for name, value in found["reference"].items():
        assert float(value) == pytest.approx(float(found["at first"][name] + found["changed"][name]) / 2)
    assert found["reference read"] == found["reference"]


@pytest.mark.parametrize("threshold", [SHARDS, WHOLE])
def test_the_reference_becomes_the_mixture_every_ref_sync_steps(
    results: dict[Any, Any], threshold: int
) -> None:
    import torch

    from grpox.config import ModelConfig
    from grpox.policy.models import load_model

    made = results[threshold]
    assert len(made) == results["ranks"]
    for result in made:
        assert result["whole"] == (threshold == WHOLE)
        before, after_one, after_two = result["reference"]
        for name, policy in result["policy"].items():
            assert torch.equal(after_one[name], before[name])
            torch.testing.assert_close(after_two[name], 0.25 * policy + 0.75 * before[name])
            assert torch.equal(after_two[name], made[0]["reference"][2][name])
    # The reference's next forward is that of a plain model with the mixture.
    model = load_model(ModelConfig(path=str(resources.files("grpox.runfile.recipes") / "quickstart" / "model")))
    model.load_state_dict(made[0]["reference"][2], strict=False)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    torch.testing.assert_close(made[0]["logits"], expected)
