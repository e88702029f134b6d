"""The sequence-level ratio of GSPO: broadcast, masked, and with gradient through every token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from grpox.contracts import LossInputs
from grpox.testing import step_gradient
from grpox_losses.configs import ClippedConfig, LuspoConfig
from grpox_losses.losses import Clipped, Luspo, sequence_ratio

MakeInputs = Callable[..., LossInputs]
LOG_RATIOS = [[0.10, -0.04, 0.03, 0.25], [-0.30, -0.20, 0.05, 0.0], [0.50, 0.30, 0.0, 0.0]]
ADVANTAGES = [[0.8] * 4, [-1.1] * 4, [0.6] * 4]
MASK = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]


def test_the_ratio_is_the_geometric_mean_of_the_unmasked_tokens(make_inputs: MakeInputs) -> None:
    # (0.10 - 0.04 + 0.03 + 0.25) / 4 = 0.085; (-0.30 - 0.20 + 0.05) / 3 = -0.15; 0.50 / 1
    ratio = sequence_ratio(make_inputs(LOG_RATIOS, ADVANTAGES, MASK))

    expected = torch.tensor([[math.exp(x)] * 4 for x in (0.085, -0.15, 0.5)], dtype=ratio.dtype)
    torch.testing.assert_close(ratio, expected)


def test_a_sequence_without_unmasked_tokens_has_ratio_one_and_no_gradient(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[0.1, 0.2], [0.1, 0.2]], [[1.0, 1.0]] * 2, [[0, 0], [1, 1]])

    ratio = sequence_ratio(inputs)
    loss = Clipped(ClippedConfig(level="sequence")).per_token(inputs).loss
    gradient = torch.autograd.grad(loss.sum(), inputs.logprobs)[0]

    assert ratio[0].tolist() == [1.0, 1.0]
    assert loss.isfinite().all()
    assert gradient[0].tolist() == [0.0, 0.0]
    assert gradient[1].all()


def test_luspo_by_hand(make_inputs: MakeInputs) -> None:
    """The sum over a sequence is its length times GSPO's: 4 * 0.8 * e^0.085 and 3 * 1.1 * e^-0.15.

    The third, e^0.5 with A > 0, is clipped at 1.2. Each token of a sequence that is not clipped has the
    gradient -w_i A, whatever the length.
    """
    inputs = make_inputs(LOG_RATIOS, ADVANTAGES, MASK)
    loss = Luspo(LuspoConfig()).per_token(inputs).loss
    sums = torch.where(inputs.token_mask, loss, 0.0).sum(dim=1)
    expected = [-4 * 0.8 * math.exp(0.085), 3 * 1.1 * math.exp(-0.15), -0.6 * 1.2]
    assert sums.tolist() == pytest.approx(expected, rel=1e-5)
    gradient = torch.autograd.grad(sums.sum(), inputs.logprobs)[0]
    assert gradient[0].tolist() == pytest.approx([-0.8 * math.exp(0.085)] * 4, rel=1e-5)
    assert gradient[1].tolist() == pytest.approx([*[1.1 * math.exp(-0.15)] * 3, 0.0], rel=1e-5)
    assert not gradient[2].any()


def test_the_kl_of_luspo_is_that_of_whole_completions() -> None:
    """The sum over a completion, as of the loss itself; rho is 0.1, -0.2, 0.3 in one and 0.4 in the other.

    TRL 1.16.0 has the same loss and gradient (`luspo` at sequence level, the KL without bias correction).
    """
    rho = [[0.1, -0.2, 0.3], [0.4]]
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, 0.0, 0.0]], dtype=torch.float64)
    reference = logprobs + torch.tensor([rho[0], [*rho[1], 0.0, 0.0]], dtype=torch.float64)
    batch = {
        "logprobs": logprobs,
        "ref_logprobs": reference,
        "advantages": torch.tensor([1.0, -1.0]),
        "token_mask": torch.tensor([[True] * 3, [True, False, False]]),
    }
    loss, (gradient,) = step_gradient("luspo", [batch], beta=0.1, max_completion_length=3)
    kl = [sum(math.exp(each) - each - 1 for each in row) for row in rho]
    assert float(loss) == pytest.approx(((-3 + 0.1 * kl[0]) + (1 + 0.1 * kl[1])) / 2, rel=1e-12)
    assert float(loss) == pytest.approx(-0.9917207411814549, rel=1e-12)  # TRL's
    slopes = [[(-1 + 0.1 * (1 - math.exp(each))) / 2 for each in rho[0]], [(1 + 0.1 * (1 - math.exp(0.4))) / 2]]
    assert gradient[0].tolist() == pytest.approx(slopes[0], rel=1e-12)
    assert gradient[1].tolist() == pytest.approx([*slopes[1], 0.0, 0.0], rel=1e-12)


@pytest.mark.parametrize("wrong", [{"delta": 1.1}, {"level": "token"}, {"clip_low": 0.0}])
def test_parameters_that_luspo_has_not(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LuspoConfig.model_validate(wrong)
