"""The numbers of the loss: worked by hand, and as the paper writes it."""

from __future__ import annotations

import math

import pytest
import torch
from grpox.contracts import LossInputs, Reduction
from grpox.errors import ConfigError

from grpox_gmpo.config import GmpoLossConfig
from grpox_gmpo.loss import GmpoLoss


def inputs(log_ratios: list[list[float]], advantages: list[float], mask: list[list[int]] | None = None):
    """Inputs whose old log-probabilities are -1 everywhere, in float64."""
    log_ratio = torch.tensor(log_ratios, dtype=torch.float64)
    old = torch.full_like(log_ratio, -1.0)
    advantage = torch.tensor(advantages, dtype=torch.float64)[:, None].expand_as(old)
    token_mask = torch.ones_like(old).bool() if mask is None else torch.tensor(mask).bool()
    return LossInputs((old + log_ratio).requires_grad_(), old, advantage, token_mask)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss"),
    [
        ([0.1, 0.3], 2.0, -2 * math.exp(0.2)),  # nothing is clipped
        ([0.6, 0.0], 1.0, -math.exp(0.2)),  # 0.6 is clipped at 0.4
        ([-0.6, 0.0], -1.0, math.exp(-0.2)),  # -0.6 is clipped at -0.4
        ([-0.6, 0.0], 1.0, -math.exp(-0.3)),  # a token that moved against its advantage never is,
        ([0.6, 0.0], -1.0, math.exp(0.3)),  # on either side
    ],
)
def test_tokens_are_clipped_and_then_averaged_in_log_space(log_ratios, advantage, loss):
    output = GmpoLoss(GmpoLossConfig(clip=0.4)).per_token(inputs([log_ratios], [advantage]))
    assert output.loss.tolist() == [pytest.approx([loss, loss], rel=1e-12)]


def papers_objective(log_ratios: list[float], advantage: float, clip: float) -> float:
    """The paper's: (prod_t |min(r A, clip(r, e^-clip, e^clip) A)|)^(1/n) sgn(A), ratios and not logarithms."""
    product = 1.0
    for log_ratio in log_ratios:
        ratio = math.exp(log_ratio)
        clipped = min(max(ratio, math.exp(-clip)), math.exp(clip))
        product *= abs(min(ratio * advantage, clipped * advantage))
    return math.copysign(product ** (1 / len(log_ratios)), advantage)


@pytest.mark.parametrize("clip", [0.1, 0.4])
@pytest.mark.parametrize("advantage", [1.7, -0.6])
def test_it_is_the_papers_product(advantage, clip):
    log_ratios = (0.5 * torch.randn(50, generator=torch.Generator().manual_seed(1))).tolist()
    output = GmpoLoss(GmpoLossConfig(clip=clip)).per_token(inputs([log_ratios], [advantage]))
    expected = -papers_objective(log_ratios, advantage, clip)
    assert output.loss[0, 0].item() == pytest.approx(expected, rel=1e-9)
    outside = sum(value > clip if advantage > 0 else value < -clip for value in log_ratios)
    assert outside > 0
    assert output.diagnostics["clip_ratio/region"].sum().item() == outside


def test_tokens_share_their_sequences_ratio_and_every_sequence_weighs_the_same(grpox_step_gradient):
    given = inputs([[0.2, 0.6, -0.1], [0.0, 0.2, 9.0]], [2.0, -1.0], [[1, 1, 1], [1, 1, 0]])
    names = ("logprobs", "old_logprobs", "advantages", "token_mask")
    micro_batch = {name: getattr(given, name).detach() for name in names}
    loss, [gradient] = grpox_step_gradient("gmpo", [micro_batch], max_completion_length=3)
    first, second = math.exp((0.2 + 0.4 - 0.1) / 3), math.exp((0.0 + 0.2) / 2)
    assert loss.item() == pytest.approx((-2 * first + second) / 2)
    # -A w / (n_i N_seq) for each token, and nothing where it was clipped or masked.
    assert gradient[0].tolist() == pytest.approx([-2 * first / 6, 0, -2 * first / 6])
    assert gradient[1].tolist() == pytest.approx([second / 4, second / 4, 0])
    assert GmpoLoss.reduction is Reduction.SEQUENCE_MEAN


def test_on_policy_it_is_grpo(grpox_step_gradient):
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    step = [{"logprobs": torch.full((2, 4), -1.0), "advantages": torch.tensor([1.5, -0.5]), "token_mask": mask}]
    loss, [gradient] = grpox_step_gradient("gmpo", step, max_completion_length=4)
    expected_loss, [expected] = grpox_step_gradient("grpo", step, max_completion_length=4)
    assert loss.item() == pytest.approx(expected_loss.item())
    assert torch.allclose(gradient, expected)


@pytest.mark.parametrize(
    ("log_ratios", "mask"),
    [
        ([5.0] + [0.0] * 49, [1] * 50),  # one odd token: the mean of the ratios is 3.9
        ([50.0, 0.1], [0, 1]),  # a masked one is in no mean
    ],
)
def test_one_token_moves_the_loss_little_or_not_at_all(log_ratios, mask):
    output = GmpoLoss(GmpoLossConfig()).per_token(inputs([log_ratios], [-1.0], [mask]))
    assert output.loss[0, -1].item() == pytest.approx(math.exp(0.1))


def test_a_long_sequence_that_is_far_off_stays_finite():
    given = inputs([[50.0] * 1000], [-1.0])
    output = GmpoLoss(GmpoLossConfig()).per_token(given)
    output.loss.sum().backward()
    assert output.loss.isfinite().all()
    assert given.logprobs.grad.isfinite().all()


@pytest.mark.parametrize("clip", [0.0, -0.4, math.inf])
def test_an_invalid_clip_is_refused_by_name(grpox_component, clip):
    with pytest.raises(ConfigError, match=r"loss\.clip"):
        grpox_component("loss", "gmpo", clip=clip)
