"""The numbers of the loss, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from grpox.contracts import LossInputs
from grpox.errors import ConfigError

from grpox_gmpo.config import GmpoLossConfig
from grpox_gmpo.loss import GmpoLoss


def inputs(log_ratios: list[float], advantage: float) -> LossInputs:
    """One sequence in float64, whose old log-probabilities are -1."""
    log_ratio = torch.tensor([log_ratios], dtype=torch.float64)
    old = torch.full_like(log_ratio, -1.0)
    mask = torch.ones_like(old).bool()
    return LossInputs((old + log_ratio).requires_grad_(), old, torch.full_like(old, advantage), mask)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss", "clipped"),
    [
        ([0.1, 0.3], 2.0, -2 * math.exp(0.2), [0, 0]),
        ([0.6, 0.0], 1.0, -math.exp(0.2), [1, 0]),  # 0.6 is clipped at 0.4
        ([-0.6, 0.0], -1.0, math.exp(-0.2), [1, 0]),  # -0.6 is clipped at -0.4
        ([-0.6, 0.0], 1.0, -math.exp(-0.3), [0, 0]),  # a token that moved against its advantage never is,
        ([0.6, 0.0], -1.0, math.exp(0.3), [0, 0]),  # on either side
    ],
)
def test_tokens_are_clipped_and_then_averaged_in_log_space(log_ratios, advantage, loss, clipped):
    output = GmpoLoss(GmpoLossConfig(clip=0.4)).per_token(inputs(log_ratios, advantage))
    assert output.loss.tolist() == [pytest.approx([loss, loss], rel=1e-12)]
    assert output.diagnostics["clip_ratio/region"].tolist() == [clipped]


def test_a_long_sequence_that_is_far_off_stays_finite():
    given = inputs([50.0] * 1000, -1.0)
    output = GmpoLoss(GmpoLossConfig()).per_token(given)
    output.loss.sum().backward()
    assert output.loss.isfinite().all()
    assert given.logprobs.grad.isfinite().all()


@pytest.mark.parametrize("clip", [0.0, -0.4, math.inf])
def test_an_invalid_clip_is_refused_by_name(grpox_component, clip):
    with pytest.raises(ConfigError, match=r"loss\.clip"):
        grpox_component("loss", "gmpo", clip=clip)
