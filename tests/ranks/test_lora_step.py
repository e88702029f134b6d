"""Adapters under the real ZeRO-3, on one rank and on two: gradients, frozen weights, the reference."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from rank_scripts import relative_difference, results_of

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

NAMES = ("body", "with head")
EXPERTS = ("experts", "experts beside layers")
SCALE = 8 / 4
R = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """24 rows of a step as one micro-batch on one rank, and as two on each of two."""
    folder = tmp_path_factory.mktemp("lora")
    return {
        "one": results_of("lora_step.py", "24x1", folder=folder),
        "two": results_of("lora_step.py", "6x2", folder=folder, ranks=2),
    }


@pytest.mark.parametrize("name", [*NAMES, *EXPERTS])
def test_the_gradient_is_the_same_for_every_split_and_way(results: dict[str, Any], name: str) -> None:
    import torch

    whole, others = results["one"][name], [results["two"][name]]
    if name in NAMES:
        plain = [results[ranks][f"{name}, all logits"] for ranks in ("one", "two")]
        assert (whole["chunked"], plain[0]["chunked"]) == (True, False)
        others += plain
    for other in others:
        assert relative_difference(whole["gradients"][0], other["gradients"][0]) < 5e-6
        assert whole["weights"].keys() == other["weights"].keys()
        for key, weight in whole["weights"].items():
            torch.testing.assert_close(other["weights"][key], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("name", [*NAMES, *EXPERTS])
def test_adapters_alone_are_trained_and_the_reference_is_the_model_without_them(
    results: dict[str, Any], ranks: str, name: str
) -> None:
    """The growth in the metrics of the last step is that of the weights with the adapters merged after it."""
    made = results[ranks][name]
    assert all(".lora_" in parameter for parameter in made["gradients"][0])
    assert made["frozen"].keys() == made["weights"].keys()
    assert all(made["frozen"].values())
    assert made["trained"] <= made["optimized"] < made["trained"] + 1000  # padding of the shards
    assert made["moved"] > 1e-3
    assert made["reference"] == 0
    first, second = made["metrics"]
    if name in NAMES:  # adapters of experts do not begin at 0
        assert first["kl"] == first["kl_old"] == 0
        assert second["kl"] > 1e-7
    old, new = made["base"], made["weights"]
    changed = [each for each in old if not (new[each] == old[each]).all()]
    square = sum(float(old[each].double().square().sum()) for each in changed)
    change = sum(float((new[each].double() - old[each].double()).square().sum()) for each in changed)
    assert made["growth"] == pytest.approx((1 + change / square) ** 0.5, rel=1e-6)
    assert second["alarms/growth"] == made["growth"] > 1 + 1e-6
    assert "alarms/norm_before" not in first


def of_layer(gradient: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of A and B of one weight W + s B A by the chain rule: s B^T G and s G A^T."""
    return SCALE * up.T @ gradient, SCALE * gradient @ down.T


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("name", EXPERTS)
def test_the_gradient_of_experts_follows_from_that_of_the_whole_weights(
    results: dict[str, Any], ranks: str, name: str
) -> None:
    import torch

    made = results[ranks][name]
    found, factors, of_sums = made["gradients"][0], made["factors"], made["gradient of the sums"]
    expected = {}
    for down_name in (each for each in found if ".lora_A." in each):
        up_name = down_name.replace(".lora_A.", ".lora_B.")
        [weight] = [each for each in of_sums if is_weight_of(each, down_name)]
        gradient, down, up = (each.double() for each in (of_sums[weight], factors[down_name], factors[up_name]))
        if gradient.dim() == 2:
            expected[down_name], expected[up_name] = of_layer(gradient, down, up)
            continue
        experts = len(gradient)
        pairs = [
            of_layer(gradient[each], down[each * R : (each + 1) * R], up[:, each::experts])
            for each in range(experts)
        ]
        expected[down_name] = torch.cat([of_down for of_down, _ in pairs])
        expected[up_name] = torch.stack([of_up for _, of_up in pairs], dim=2).flatten(1)
    assert len(expected) == 2 * (6 if name == "experts" else 6 + 8)
    assert all(gradient.abs().max() > 1e-7 for gradient in expected.values())
    assert relative_difference(expected, found) < 1e-5


def is_weight_of(weight: str, down: str) -> bool:
    """Tell whether `down` is A of this weight; of the experts' modules the inner one is of gate_up_proj."""
    layer = down.partition(".lora_A.")[0]
    if layer.endswith(".experts"):
        return weight == f"{layer}.down_proj"
    if layer.endswith(".experts.base_layer"):
        return weight == layer.replace("base_layer", "gate_up_proj")
    return weight == f"{layer}.weight"
