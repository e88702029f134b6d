"""The LUSPO loss: the contract of its kind with its formula, numbers worked by hand, and its binding."""

from __future__ import annotations

import math

import pytest
import torch
from grpox_example_loss.config import LuspoConfig
from grpox_example_loss.loss import Luspo

from grpox.contracts import LossInputs
from grpox.testing import LossConformance


def paper(logprobs, old_logprobs, advantages):
    """The clipped geometric mean of the ratios, at every token."""
    ratio = math.exp(sum(logprobs) / len(logprobs) - sum(old_logprobs) / len(logprobs))
    return [-min(ratio * a, min(max(ratio, 0.8), 1.2) * a) for a in advantages]


def sum_of_tokens(losses):
    return sum(map(sum, losses)) / len(losses)


class TestLuspo(LossConformance):
    component = "example-luspo"
    reference = staticmethod(paper)
    reduction = staticmethod(sum_of_tokens)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss"),
    [
        ([0.1, 0.3], 1.0, -1.2),  # exp(0.2) = 1.2214 is clipped at 1.2
        ([0.1, 0.3], -1.0, math.exp(0.2)),  # the worse branch is never clipped
        ([-0.6, 0.0], -2.0, 1.6),  # exp(-0.3) = 0.7408 is clipped at 0.8
        ([0.1, 0.1], 3.0, -3 * math.exp(0.1)),
    ],
)
def test_the_geometric_mean_of_the_ratios_is_clipped(log_ratio, advantage, loss):
    old = torch.full((1, 2), -1.0)
    given = LossInputs(old + torch.tensor([log_ratio]), old, torch.full((1, 2), advantage), old < 0)
    assert Luspo(LuspoConfig()).per_token(given).loss.tolist() == [pytest.approx([loss, loss], rel=1e-6)]
