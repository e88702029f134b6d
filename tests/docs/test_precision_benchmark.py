"""bfloat16 beside float32 on the quickstart's model: log-probabilities and the direction of the gradient."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from grpox.runfile.load import load_run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from precision import compare


def test_bfloat16_is_close_to_float32_on_the_same_rollouts() -> None:
    found = compare(load_run("quickstart"), prompts=8, samples=4, length=4, device=torch.device("cpu"))
    assert found["tokens"] == 8 * 4 * 4
    assert 0 < found["logprob_difference_mean"] <= 0.05
    assert found["gradient_cosine"] >= 0.99
    assert abs(found["gradient_length"] - 1) < 0.05
