"""Offload, bfloat16, clipping, fused AdamW, checkpointing and raw settings: steps under ZeRO-3, in numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rank_scripts import results_of

if TYPE_CHECKING:
    import torch

SCRIPT = "engine_steps.py"
CLIP = 0.5
EXACT = ["checkpointing", "reentrant checkpointing", "parameters offloaded", "own settings"]
ROUNDED = ["unfused", "optimizer offloaded", "both offloaded"]
FLOAT32 = ["plain", "unclipped", *EXACT, *ROUNDED]
BFLOAT16 = ["bfloat16", "bfloat16 offloaded"]


Steps = dict[str, Any]
Results = dict[str, dict[str, Steps]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """24 rows as four micro-batches on one rank and on two; in bfloat16 also as one."""
    folder = tmp_path_factory.mktemp("engine")
    every = [*FLOAT32, *BFLOAT16]
    one = results_of(SCRIPT, json.dumps({"24x1": ["bfloat16"], "6x4": every}), folder=folder)
    two = results_of(SCRIPT, json.dumps({"6x2": every}), folder=folder, ranks=2)
    return {"whole": one["24x1"], "one rank": one["6x4"], "two ranks": two["6x2"]}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat([tensor.detach().flatten().double() for tensor in tensors.values()])


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float((flat(one) - flat(other)).abs().max())


def adamw_by_hand(steps: Steps, clip: float) -> dict[str, torch.Tensor]:
    """The weights after plain PyTorch's AdamW has taken the recorded gradients, clipped by their norm."""
    import torch

    weights = {name: torch.nn.Parameter(value.float()) for name, value in steps["before"].items()}
    decayed = [weight for weight in weights.values() if weight.ndim == 2]
    plain = [weight for weight in weights.values() if weight.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.8, 0.9),
        eps=0.01,
    )
    for gradients in steps["gradients"]:
        factor = min(1.0, clip / float(flat(gradients).norm())) if clip else 1.0
        for name, weight in weights.items():
            weight.grad = gradients[name].float() * factor
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_a_way_to_save_memory_or_time_gives_the_same_weights(results: Results, ranks: str, name: str) -> None:
    plain, other = results[ranks]["plain"], results[ranks][name]
    assert furthest(plain["before"], plain["weights"]) > 0.02
    assert furthest(plain["weights"], other["weights"]) < 1e-6
    assert other["norms"] == pytest.approx(plain["norms"], rel=1e-6)


def test_an_optimizer_on_nvme_gives_the_same_weights(results: Results, tmp_path: Path) -> None:
    name = "optimizer on nvme"
    other = results_of(SCRIPT, json.dumps({"6x4": [name]}), folder=tmp_path)["6x4"][name]
    if other is None:
        pytest.skip("libaio and its headers are not installed")
    assert furthest(results["one rank"]["plain"]["weights"], other["weights"]) < 1e-6
    assert list((tmp_path / "swap").rglob("*.swp"))


@pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
@pytest.mark.parametrize(("name", "clip"), [("plain", CLIP), ("unclipped", 0.0), ("unfused", CLIP)])
def test_a_step_is_adamw_of_the_clipped_gradient(results: Results, ranks: str, name: str, clip: float) -> None:
    steps = results[ranks][name]
    by_hand = adamw_by_hand(steps, clip)
    assert furthest(by_hand, steps["weights"]) < 1e-6
    # With the other clipping the weights would be elsewhere: the numbers tell the two apart.
    assert furthest(adamw_by_hand(steps, CLIP - clip), steps["weights"]) > 1e-3


@pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
@pytest.mark.parametrize("name", ["plain", "unclipped", "optimizer offloaded", "bfloat16"])
def test_the_norm_told_is_that_before_clipping(results: Results, ranks: str, name: str) -> None:
    steps = results[ranks][name]
    assert steps["norms"] == pytest.approx([float(flat(g).norm()) for g in steps["gradients"]], rel=1e-6)
    assert min(steps["norms"]) > 10 * CLIP


@pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_updates_float32_master_weights_with_float32_gradients(
    results: Results, ranks: str, name: str
) -> None:
    import torch

    steps = results[ranks][name]
    assert {weight.dtype for weight in steps["weights"].values()} == {torch.bfloat16}
    for tensors in (steps["master"], *steps["gradients"]):
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert furthest(adamw_by_hand(steps, CLIP), steps["master"]) < 1e-6
    rounded = {name: weight.bfloat16() for name, weight in steps["master"].items()}
    assert furthest(rounded, steps["weights"]) == 0
    assert furthest(steps["master"], rounded) > 0


@pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
def test_bfloat16_is_near_float32(results: Results, ranks: str) -> None:
    exact, rounded = (flat(results[ranks][name]["gradients"][0]) for name in ("plain", "bfloat16"))
    assert float((exact - rounded).norm() / exact.norm()) < 0.1
    assert results[ranks]["bfloat16"]["norms"] == pytest.approx(results[ranks]["plain"]["norms"], rel=0.05)


@pytest.mark.parametrize("split", ["one rank", "two ranks"])
def test_bfloat16_gives_every_split_the_same_gradient_to_its_precision(results: Results, split: str) -> None:
    """bfloat16 has 8 bits: a rounding is 2**-9 at most, and sums over rows are rounded in another order."""
    whole, parts = (flat(results[name]["bfloat16"]["gradients"][0]) for name in ("whole", split))
    assert float((whole - parts).norm() / whole.norm()) < 2**-5


@pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
def test_buckets_of_another_size_give_the_same_bits(results: Results, ranks: str) -> None:
    plain, other = (results[ranks][name]["gradients"][0] for name in ("plain", "own settings"))
    assert furthest(plain, other) == 0


@pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
def test_float32_weights_are_their_own_master_weights(results: Results, ranks: str) -> None:
    """There are two pieces at least, with weight decay and without."""
    own = {name: steps["own masters"] for name, steps in results[ranks].items()}
    assert all(len(each) >= 2 for each in own.values())
    assert {name: set(each) for name, each in own.items()} == {
        name: {name not in BFLOAT16} for name in results[ranks]
    }


def test_checkpointing_is_really_on(results: Results) -> None:
    on = {name for name, steps in results["two ranks"].items() if steps["checkpointing"]}
    assert on == {"checkpointing", "reentrant checkpointing"}
