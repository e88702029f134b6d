"""The contracts with the paper's formulas, TRL's numbers, steps by hand, and the runs that are refused."""

from __future__ import annotations

import math

import pytest
import torch
from grpox.contracts import LossInputs, Reduction
from grpox.errors import ConfigError
from grpox.testing import CorrectionConformance, LossConformance
from grpox.toolkit import load_run

from grpox_vespo.config import VespoCorrectionConfig, VespoLossConfig
from grpox_vespo.correction import VespoCorrection
from grpox_vespo.loss import VespoLoss

NAN = float("nan")


def paper(logprobs, old_logprobs, advantages, correction_weights):
    """The gradient of each token of a sequence: -W^k exp(lambda (1 - W)) A, (k, lambda) by the sign of A."""
    ratios = (math.exp(new - old) for new, old in zip(logprobs, old_logprobs, strict=True))
    weight = min(max(math.prod(ratios) * math.prod(correction_weights), 1e-8), math.exp(20))
    kernels = [weight**k * math.exp(decay * (1 - weight)) for k, decay in ((2.0, 3.0), (3.0, 2.0))]
    return [-kernels[advantage < 0] * advantage for advantage in advantages]


class TestVespoLoss(LossConformance):
    component = "vespo"
    reference = staticmethod(paper)
    reduction = staticmethod(lambda losses: sum(map(sum, losses)) / sum(map(len, losses)))


class TestVespoCorrection(CorrectionConformance):
    component = "vespo"
    reference = staticmethod(
        lambda old, sampler: [(math.exp(a - b), True) for a, b in zip(old, sampler, strict=True)]
    )


def inputs(log_ratios: list[float], weights: list[float], advantage: float) -> LossInputs:
    """One sequence in float64, whose old log-probabilities are -1."""
    log_ratio = torch.tensor([log_ratios], dtype=torch.float64)
    old = torch.full_like(log_ratio, -1.0)
    return LossInputs(
        logprobs=(old + log_ratio).requires_grad_(),
        old_logprobs=old,
        advantages=torch.full_like(old, advantage),
        token_mask=torch.ones_like(old).bool(),
        correction_weights=torch.tensor([weights], dtype=torch.float64),
    )


def phi(given: LossInputs, **params: float) -> float:
    """The factor of the sequence, from the gradient of its first token."""
    VespoLoss(VespoLossConfig(**params)).per_token(given).loss.sum().backward()
    return (given.logprobs.grad[0, 0] / -given.advantages[0, 0]).item()


TRL = [  # log-ratios, R, advantage, factor with the defaults, factor with k 1.5 / 2.5 and lambda 2.0 / 0.5
    ([0.3, -0.1, 0.2], [1.2, 0.9, 1.0], 1.5, 0.41495303323426524, 0.6023601328580827),
    ([0.3, -0.1, 0.2], [1.2, 0.9, 1.0], -1.5, 1.2318803926411868, 2.4273916022395277),
    ([-0.5, -0.4, 0.1], [0.8, 1.1, 2.0], 0.7, 1.1713661152706845, 1.0685822393113225),
    ([-0.5, -0.4, 0.1], [0.8, 1.1, 2.0], -0.7, 0.751490638808177, 0.6174698943250474),
    ([-2.0, -3.0, 0.0], [1.0, 1.0, 1.0], 1.0, 0.0008936343767490857, 0.004032067956767148),
    # Out of every bound: log-ratios of 20 and -20 and 8, log R of ln 1e-8 and ln 3 and 0.
    ([25.0, -30.0, 8.0], [0.0, 3.0, 1.0], -1.0, 5.283754331079461e-12, 1.2468683370468776e-10),
]
"""Results of `get_gamma_weights` of TRL 1.16."""


@pytest.mark.parametrize(("log_ratios", "weights", "advantage", "factor", "other"), TRL)
def test_the_factor_is_trls(log_ratios, weights, advantage, factor, other):
    assert phi(inputs(log_ratios, weights, advantage)) == pytest.approx(factor, rel=1e-9)
    params = {"k_pos": 1.5, "lambda_pos": 2.0, "k_neg": 2.5, "lambda_neg": 0.5}
    assert phi(inputs(log_ratios, weights, advantage), **params) == pytest.approx(other, rel=1e-9)


def test_a_step_uses_the_correction_once_and_every_token_weighs_the_same(grpox_step_gradient):
    micro_batch = {
        "logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -1.0, 0.0]]),
        "old_logprobs": torch.tensor([[-1.1, -2.0, -0.6], [-1.5, -1.2, 0.0]]),
        "sampler_logprobs": torch.tensor([[-1.2, -1.9, NAN], [-1.4, -1.0, NAN]]),
        "advantages": torch.tensor([2.0, -1.0]),
        "token_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
    }
    _, [gradient] = grpox_step_gradient("vespo", [micro_batch], correction="vespo", max_completion_length=3)
    # pi / mu where mu is known, pi / pi_old where it is not: logs 0.2 - 0.1 + 0.1, and -0.1 + 0.0
    first, second = math.exp(0.2), math.exp(-0.1)
    up, down = first**2 * math.exp(3 * (1 - first)), second**3 * math.exp(2 * (1 - second))
    assert gradient[0].tolist() == pytest.approx([-2 * up / 5] * 3, rel=1e-6)
    assert gradient[1].tolist() == pytest.approx([down / 5, down / 5, 0], rel=1e-6)
    assert VespoLoss.reduction is Reduction.TOKEN_MEAN


@pytest.mark.parametrize(
    ("log_ratios", "weights", "advantage"),
    [
        ([0.0] * 3, [1.0, 0.0, 1.0], 1.0),  # a token that a correction drops
        ([-1.0] * 5000, [1.0] * 5000, 1.0),  # a long one that is far off, which does not overflow
    ],
)
def test_a_sequence_fades_to_next_to_nothing(log_ratios, weights, advantage):
    given = inputs(log_ratios, weights, advantage)
    assert phi(given) < 1e-14
    assert given.logprobs.grad.isfinite().all()


def test_the_correction_caps_a_weight_only_where_it_could_not_be_computed_with():
    old, sampler = torch.tensor([[-1.0]]), torch.tensor([[-90.0]])
    weights, keep = VespoCorrection(VespoCorrectionConfig()).correct(old, sampler, torch.tensor([[True]]))
    assert weights.item() == pytest.approx(math.exp(20.0), rel=1e-6)
    assert keep.tolist() == [[True]]


@pytest.mark.parametrize("k", [0.0, 10.0])
@pytest.mark.parametrize("decay", [0.01, 20.0])
def test_at_every_bound_of_the_parameters_the_factor_is_finite_in_float32(k, decay):
    log_weight = torch.linspace(math.log(1e-8), 20, 2000).unsqueeze(1)
    zeros = torch.zeros_like(log_weight)
    given = LossInputs(log_weight, zeros, zeros + 1, (zeros + 1).bool(), correction_weights=zeros + 1)
    loss = VespoLoss(VespoLossConfig(k_pos=k, lambda_pos=decay))
    assert loss.expected_gradient(given).isfinite().all()


# -- Runs without a correction for the loss are refused before anything loads ----------------------------


@pytest.mark.parametrize("correction", ["none", "sequence-truncate"])  # the R of the second is a sequence's
def test_a_run_without_weights_of_tokens_is_refused(correction: str) -> None:
    with pytest.raises(ConfigError, match="needs 'token-weights', which nothing in this run provides"):
        load_run("quickstart", ["loss=vespo", f"correction={correction}"])


@pytest.mark.parametrize("correction", ["vespo", "token-truncate"])
def test_a_run_with_weights_of_tokens_is_right(correction: str) -> None:
    load_run("quickstart", ["loss=vespo", f"correction={correction}"])
