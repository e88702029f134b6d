"""The objective of a micro-batch by hand: its terms and diagnostics; masked positions leak nothing."""

import math

import pytest
import torch

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox.update.objective import build_inputs, objective
from grpox.update.packing import LossTraits, StepTotals, token_weights
from grpox_losses.configs import ClippedConfig
from grpox_losses.losses import Dapo

B, T = 12, 6


def tensors(seed=0):
    """Log-probabilities, advantages and mask of ragged float64 rows, one of them with no token at all."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (B,), generator=draw)
    lengths[3] = 0
    mask = torch.arange(T) < lengths[:, None]
    logprobs = -torch.rand(B, T, generator=draw, dtype=torch.float64)
    return logprobs, torch.randn(B, generator=draw, dtype=torch.float64), mask


class NanWhereMasked:
    """A loss that itself writes NaN at masked positions."""

    reduction = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        holes = torch.where(inputs.token_mask, 1.0, torch.nan)
        return LossOutput(inputs.logprobs * holes, {"holes": holes})


def test_nan_that_a_loss_writes_at_masked_positions_is_dropped():
    logprobs, advantages, mask = tensors()
    parameter = logprobs.clone().requires_grad_()
    weights = torch.where(mask, 0.5, 0.0)
    output = objective(NanWhereMasked(), build_inputs(parameter, mask, advantages), weights)
    output.loss.backward()
    expected = (0.5 * logprobs[mask]).sum()
    torch.testing.assert_close(output.loss.detach(), expected)
    assert output.diagnostics["holes"].isfinite().all()


def test_without_old_logprobs_the_ratio_is_one_with_its_gradient():
    logprobs, advantages, mask = tensors()
    parameter = logprobs.clone().requires_grad_()
    weights = token_weights(Reduction.TOKEN_MEAN, mask, StepTotals(int(mask.sum()), B, 1, T))
    output = objective(Dapo(ClippedConfig()), build_inputs(parameter, mask, advantages), weights)
    output.loss.backward()
    assert output.diagnostics["ratio"][mask].eq(1).all()
    assert output.diagnostics["kl_old"].eq(0).all()
    # d/d logpi of -w A is -A at w = 1.
    torch.testing.assert_close(parameter.grad, -(advantages[:, None] * weights))


class Noting:
    """A loss of log pi * A that keeps what it was given."""

    reduction = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.given = inputs
        return LossOutput(inputs.logprobs * inputs.advantages, {"mine": inputs.logprobs * 2})


# One completion of three tokens, the last of them masked and full of garbage, by powers of two.
LN2 = math.log(2)
NAN = math.nan
HALVES = torch.tensor([[-LN2, -2 * LN2, NAN]], dtype=torch.float64)
OLD = torch.tensor([[-2 * LN2, -2 * LN2, math.inf]], dtype=torch.float64)
REFERENCE = torch.tensor([[0.0, -2 * LN2, NAN]], dtype=torch.float64)
TWO_OF_THREE = torch.tensor([[True, True, False]])
WEIGHTS = torch.tensor([[0.5, 0.25, 0.0]], dtype=torch.float64)
ENTROPY = torch.tensor([[0.3, 0.7, NAN]], dtype=torch.float64)


SETTINGS = ("beta", "kl", "factor", "bonus_weights", "policy_keep")


def worked(loss, **given):
    """The objective of the three tokens, A = 2; and the gradients of log pi and of the entropy."""
    logprobs, entropy = HALVES.clone().requires_grad_(), ENTROPY.clone().requires_grad_()
    advantages = torch.tensor([2.0], dtype=torch.float64)
    settings = {name: given.pop(name) for name in SETTINGS if name in given}
    settings["folds_correction"] = LossTraits.of(loss).folds_correction
    inputs = build_inputs(logprobs, TWO_OF_THREE, advantages, entropy=entropy, **given)
    output = objective(loss, inputs, WEIGHTS, **settings)
    output.loss.backward()
    return output, logprobs.grad, entropy.grad


def close(found, *expected):
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


def test_a_loss_is_given_neutral_values_where_masked_and_log_pi_alone_has_a_gradient():
    loss = Noting()
    worked(loss, old_logprobs=OLD, factor=torch.tensor([[3.0, 0.5, NAN]]).double())
    close(loss.given.logprobs.detach(), -LN2, -2 * LN2, 0)
    close(loss.given.old_logprobs, -2 * LN2, -2 * LN2, 0)
    close(loss.given.advantages, 2, 2, 0)
    close(loss.given.entropy, 0.3, 0.7, 0)
    assert torch.equal(loss.given.token_mask, TWO_OF_THREE)
    assert loss.given.correction_weights is None
    assert loss.given.logprobs.requires_grad
    assert not any(
        tensor.requires_grad for tensor in (loss.given.old_logprobs, loss.given.advantages, loss.given.entropy)
    )


def test_an_entropy_that_a_loss_uses_has_no_gradient_but_that_of_the_bonus():
    class OfEntropy:
        reduction = Reduction.TOKEN_MEAN

        def per_token(self, inputs: LossInputs) -> LossOutput:
            return LossOutput(inputs.logprobs * inputs.entropy)

    output, gradient, of_entropy = worked(OfEntropy())
    assert output.loss.item() == pytest.approx(0.5 * -LN2 * 0.3 + 0.25 * -2 * LN2 * 0.7)
    close(gradient, 0.5 * 0.3, 0.25 * 0.7, 0)
    assert of_entropy is None
    bonus = torch.tensor([[0.125, 0.0625, 0.0]], dtype=torch.float64)
    rewarded, gradient, of_entropy = worked(OfEntropy(), bonus_weights=bonus)
    assert (rewarded.loss - output.loss).item() == pytest.approx(-(0.125 * 0.3 + 0.0625 * 0.7))
    close(gradient, 0.5 * 0.3, 0.25 * 0.7, 0)
    close(of_entropy, -0.125, -0.0625, 0)


def test_a_token_that_is_left_out_keeps_its_kl_and_what_the_loss_said_of_it():
    """policy term -2 ln 2 and -4 ln 2; k1 = log pi - log ref: -ln 2 and 0."""
    keep = torch.tensor([[False, True, True]])
    output, gradient, _ = worked(
        Noting(), beta=0.1, kl="k1", reference_logprobs=REFERENCE, policy_keep=keep, old_logprobs=OLD
    )
    assert output.loss.item() == pytest.approx(0.5 * 0.1 * -LN2 + 0.25 * -4 * LN2)
    close(gradient, 0.5 * 0.1, 0.25 * (2 + 0.1), 0)
    close(output.policy_loss, -2 * LN2, -4 * LN2, 0)
    assert not output.policy_loss.requires_grad


def test_diagnostics_by_hand_without_gradient_and_0_where_masked():
    output, _, _ = worked(Noting(), kl="k2", beta=0.1, old_logprobs=OLD, reference_logprobs=REFERENCE)
    assert sorted(output.diagnostics) == ["kl", "kl_old", "mine", "ratio"]
    close(output.diagnostics["mine"], -2 * LN2, -4 * LN2, 0)
    close(output.diagnostics["ratio"], 2, 1, 0)
    close(output.diagnostics["kl_old"], 2 - 1 - LN2, 0, 0)  # k3 with rho = log pi - log old = ln 2
    close(output.diagnostics["kl"], LN2**2 / 2, 0, 0)
    assert not any(values.requires_grad for values in output.diagnostics.values())


def test_a_reference_without_beta_is_measured_by_k3_and_adds_nothing():
    output, gradient, _ = worked(Noting(), reference_logprobs=REFERENCE)
    assert output.loss.item() == pytest.approx(2 * (0.5 * -LN2 + 0.25 * -2 * LN2))
    close(gradient, 2 * 0.5, 2 * 0.25, 0)
    close(output.diagnostics["kl"], 2 - LN2 - 1, 0, 0)
    assert "kl" not in worked(Noting())[0].diagnostics


def test_the_unbiased_kl_is_weighed_by_the_ratio_to_the_old_policy():
    output, _, _ = worked(Noting(), beta=0.1, kl="unbiased", old_logprobs=OLD, reference_logprobs=REFERENCE)
    close(output.diagnostics["kl"], 2 * (2 - LN2 - 1), 0, 0)


@pytest.mark.parametrize("folds", [False, True])
def test_a_correction_that_is_nan_where_masked_leaks_nothing(folds):
    class Folding(Noting):
        folds_correction = folds

        def per_token(self, inputs: LossInputs) -> LossOutput:
            output = super().per_token(inputs)
            return LossOutput(output.loss * inputs.correction_weights) if folds else output

    correction = torch.tensor([[3.0, 0.5, NAN]], dtype=torch.float64)
    loss = Folding()
    output, gradient, _ = worked(loss, factor=correction)
    assert output.loss.item() == pytest.approx(2 * (0.5 * -LN2 * 3 + 0.25 * -2 * LN2 * 0.5))
    close(gradient, 2 * 0.5 * 3, 2 * 0.25 * 0.5, 0)
    if folds:
        close(loss.given.correction_weights, 3, 0.5, 0)


def test_an_advantage_of_each_token_is_its_own():
    advantages = torch.tensor([[2.0, -1.0, NAN]], dtype=torch.float64)
    output = objective(Noting(), build_inputs(HALVES, TWO_OF_THREE, advantages), WEIGHTS)
    assert output.loss.item() == pytest.approx(0.5 * -LN2 * 2 + 0.25 * -2 * LN2 * -1)


def test_declarations_are_read_from_a_loss_or_its_class_and_default_to_false():
    class Folding(Noting):
        reduction = Reduction.SEQUENCE_SUM
        folds_correction = True

        def __init__(self):
            self.zero_at_zero_advantage = True

    assert LossTraits.of(Noting()) == LossTraits(Reduction.TOKEN_MEAN, False, False)
    assert LossTraits.of(Folding()) == LossTraits(Reduction.SEQUENCE_SUM, True, True)


def test_the_kl_to_the_old_policy_is_that_of_its_own_tokens():
    """Over all 17 tokens, each weighed by pi_old, it is KL(pi_old || pi), however far pi has moved."""
    generator = torch.Generator().manual_seed(0)
    old, now = (torch.randn(2, 17, generator=generator, dtype=torch.float64) * 2.5).log_softmax(dim=1)
    inputs = build_inputs(now[None], torch.ones(1, 17).bool(), torch.ones(1), old_logprobs=old[None])
    measured = objective(Noting(), inputs, torch.ones(1, 17)).diagnostics["kl_old"][0]
    exact = (old.exp() * (old - now)).sum()
    assert exact > 2
    torch.testing.assert_close((old.exp() * measured).sum(), exact)
