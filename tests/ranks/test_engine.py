"""Offload, bfloat16, clipping, fused AdamW, checkpointing and raw settings: steps under ZeRO-3, in numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rank_scripts import relative_difference, results_of

if TYPE_CHECKING:
    import torch

SCRIPT = "engine_steps.py"
CLIP = 0.5
EXACT = ["checkpointing", "reentrant checkpointing", "parameters offloaded", "own settings"]
ROUNDED = ["unfused", "optimizer offloaded", "both offloaded"]
FLOAT32 = ["plain", "unclipped", *EXACT, *ROUNDED]
BFLOAT16 = ["bfloat16", "bfloat16 offloaded"]
RANKS = ["one rank", "two ranks"]
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


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_a_way_to_save_memory_or_time_gives_the_same_weights(results: Results, ranks: str, name: str) -> None:
    plain, other = results[ranks]["plain"], results[ranks][name]
    assert furthest(plain["before"], plain["weights"]) > 0.02
    assert furthest(plain["weights"], other["weights"]) < 1e-6
    assert other["norms"] == pytest.approx(plain["norms"], rel=1e-6)
    assert other["checkpointing"] == name.endswith("checkpointing")
    if name == "own settings":  # buckets of another size
        assert furthest(plain["gradients"][0], other["gradients"][0]) == 0


def test_an_optimizer_on_nvme_gives_the_same_weights(results: Results, tmp_path: Path) -> None:
    name = "optimizer on nvme"
    other = results_of(SCRIPT, json.dumps({"6x4": [name]}), folder=tmp_path)["6x4"][name]
    if other is None:
        pytest.skip("libaio and its headers are not installed")
    assert furthest(results["one rank"]["plain"]["weights"], other["weights"]) < 1e-6
    assert list((tmp_path / "swap").rglob("*.swp"))


def assert_norms_before_clipping(steps: Steps) -> None:
    assert steps["norms"] == pytest.approx([float(flat(each).norm()) for each in steps["gradients"]], rel=1e-6)
    assert min(steps["norms"]) > 10 * CLIP


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "clip"), [("plain", CLIP), ("unclipped", 0.0), ("unfused", CLIP)])
def test_a_step_is_adamw_of_the_clipped_gradient(results: Results, ranks: str, name: str, clip: float) -> None:
    steps = results[ranks][name]
    assert_norms_before_clipping(steps)
    assert furthest(adamw_by_hand(steps, clip), steps["weights"]) < 1e-6
    # With the other clipping the weights would be elsewhere: the numbers tell the two apart.
    assert furthest(adamw_by_hand(steps, CLIP - clip), steps["weights"]) > 1e-3


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_updates_float32_master_weights_with_float32_gradients(
    results: Results, ranks: str, name: str
) -> None:
    import torch

    steps = results[ranks][name]
    assert_norms_before_clipping(steps)
    assert {weight.dtype for weight in steps["weights"].values()} == {torch.bfloat16}
    for tensors in (steps["master"], *steps["gradients"]):
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert furthest(adamw_by_hand(steps, CLIP), steps["master"]) < 1e-6
    rounded = {name: weight.bfloat16() for name, weight in steps["master"].items()}
    assert furthest(rounded, steps["weights"]) == 0
    assert furthest(steps["master"], rounded) > 0


@pytest.mark.parametrize("ranks", RANKS)
def test_bfloat16_is_near_float32_and_splits_agree_to_its_precision(results: Results, ranks: str) -> None:
    """bfloat16 has 8 bits: a rounding is 2**-9 at most, and sums over rows are rounded in another order."""
    exact, rounded = (results[ranks][name] for name in ("plain", "bfloat16"))
    assert relative_difference(exact["gradients"][0], rounded["gradients"][0]) < 0.1
    assert rounded["norms"] == pytest.approx(exact["norms"], rel=0.05)
    whole = results["whole"]["bfloat16"]["gradients"][0]
    assert relative_difference(whole, rounded["gradients"][0]) < 2**-5


@pytest.mark.parametrize("ranks", RANKS)
def test_float32_weights_are_their_own_master_weights(results: Results, ranks: str) -> None:
    """There are two pieces at least, with weight decay and without."""
    for name, steps in results[ranks].items():
        assert len(steps["own masters"]) >= 2
        assert set(steps["own masters"]) == {name not in BFLOAT16}
