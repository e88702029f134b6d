"""Adapters under the real ZeRO-3, on one rank and on two: gradients, frozen weights, the reference."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from rank_scripts import results_of

if TYPE_CHECKING:
    import torch

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
]

NAMES = ("body", "with head")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """24 rows of a step as one micro-batch on one rank, and as two on each of two."""
    folder = tmp_path_factory.mktemp("lora")
    return {
        "one": results_of("lora_step.py", "24x1", folder=folder),
        "two": results_of("lora_step.py", "6x2", folder=folder, ranks=2),
    }


def relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    import torch

    assert one.keys() == other.keys()
    flat = [torch.cat([each[name].flatten().double() for name in one]) for each in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_same_for_every_split_and_way(results: dict[str, Any], name: str) -> None:
    import torch

    whole = results["one"][name]
    assert whole["chunked"]
    assert not results["one"][f"{name}, all logits"]["chunked"]
    plain = f"{name}, all logits"
    for other in (results["two"][name], results["one"][plain], results["two"][plain]):
        assert relative_difference(whole["gradients"][0], other["gradients"][0]) < 5e-6
        for key, weight in whole["weights"].items():
            torch.testing.assert_close(other["weights"][key], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("name", NAMES)
def test_adapters_alone_have_gradients_optimizer_states_and_change(
    results: dict[str, Any], ranks: str, name: str
) -> None:
    made = results[ranks][name]
    assert all(".lora_" in parameter for parameter in made["gradients"][0])
    assert made["frozen"]
    assert all(made["frozen"].values())
    assert made["trained"] <= made["optimized"] < made["trained"] + 1000  # padding of the shards
    assert made["moved"] > 1e-3


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_model_that_the_run_began_with(
    results: dict[str, Any], ranks: str, name: str
) -> None:
    made = results[ranks][name]
    first, second = made["metrics"]
    assert first["kl"] == first["kl_old"] == 0
    assert second["kl"] > 1e-7
    assert made["reference"] == 0
