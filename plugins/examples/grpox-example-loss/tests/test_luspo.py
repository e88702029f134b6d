"""Numbers of the LUSPO loss worked by hand, and the loss as grpox binds it."""

from __future__ import annotations

import math

import pytest
import torch
from grpox_example_loss.config import LuspoConfig
from grpox_example_loss.loss import Luspo

from grpox.contracts import LossInputs, Reduction


def inputs(log_ratio: list[list[float]], advantage: list[float], mask: list[list[int]]) -> LossInputs:
    """Inputs whose old log-probabilities are -1 everywhere."""
    old = torch.full((len(mask), len(mask[0])), -1.0)
    logprobs = (old + torch.tensor(log_ratio)).requires_grad_()
    advantages = torch.tensor(advantage)[:, None].expand_as(old)
    return LossInputs(logprobs, old, advantages, torch.tensor(mask, dtype=torch.bool))


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
    output = Luspo(LuspoConfig()).per_token(inputs([log_ratio], [advantage], [[1, 1]]))
    assert output.loss.tolist() == [pytest.approx([loss, loss], rel=1e-6)]


def test_the_gradient_of_a_token_does_not_depend_on_the_length_of_its_sequence():
    given = inputs([[0.0] * 4, [0.0] * 4], [2.0, 2.0], [[1, 0, 0, 0], [1, 1, 1, 1]])
    output = Luspo(LuspoConfig()).per_token(given)
    (output.loss * given.token_mask).sum().backward()
    assert given.logprobs.grad.tolist() == [[-2.0, 0.0, 0.0, 0.0], [-2.0, -2.0, -2.0, -2.0]]


@pytest.mark.parametrize(
    ("log_ratio", "mask", "loss"), [([0.1, 50.0], [1, 0], math.exp(0.1)), ([0.0] * 2, [0, 0], 1.0)]
)
def test_masked_tokens_do_not_enter_the_ratio(log_ratio, mask, loss):
    output = Luspo(LuspoConfig()).per_token(inputs([log_ratio], [1.0], [mask]))
    assert output.loss[0, 0].item() == pytest.approx(-loss)
    assert torch.isfinite(output.loss).all()


def test_grpox_binds_it_and_sums_over_the_tokens_of_a_sequence(grpox_component):
    loss = grpox_component("loss", "example-luspo", clip_low=0.1)
    assert isinstance(loss, Luspo)
    assert loss.reduction is Reduction.SEQUENCE_SUM
