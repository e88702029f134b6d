"""Adapters under the real ZeRO-3, on one rank and on two: gradients, frozen weights, the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("lora_step.py")
NAMES = ("body", "with head")


def take_steps(folder: Path, ranks: int, batch_size: int, accumulation: int) -> dict[str, Any]:
    out = folder / f"{ranks}.pt"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), str(out), str(batch_size), str(accumulation)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = torch.load(out)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """24 rows of a step as one micro-batch on one rank, and as two on each of two."""
    folder = tmp_path_factory.mktemp("lora")
    return {"one": take_steps(folder, 1, 24, 1), "two": take_steps(folder, 2, 6, 2)}


def relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    flat = [torch.cat([each[name].flatten().double() for name in one]) for each in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_same_for_every_split_and_way(results: dict[str, Any], name: str) -> None:
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
