"""The step's loss: its settings, what a correction and an entropy bonus add, and corrections that are none."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpox.config import TrainConfig
from grpox.contracts import Correction, LossInputs, LossOutput, Reduction
from grpox.errors import RunFailed
from grpox.runtime.world import World
from grpox.update.objective import MicroBatchLoss, StepLoss, build_inputs
from grpox.update.packing import StepTotals
from grpox.update.token_metrics import measure
from grpox_corrections.configs import (
    GeometricMaskConfig,
    SequenceMaskConfig,
    SequenceTruncateConfig,
    TokenMaskConfig,
    TokenTruncateConfig,
)
from grpox_corrections.corrections import (
    GeometricMask,
    NoCorrection,
    SequenceMask,
    SequenceTruncate,
    TokenMask,
    TokenTruncate,
)
from grpox_losses.configs import ClippedConfig
from grpox_losses.losses import Dapo

CPU = torch.device("cpu")
NAN = math.nan
NONE = NoCorrection()
DAPO = Dapo(ClippedConfig())
CORRECTIONS: dict[str, Correction] = {
    "none": NONE,
    "token-truncate": TokenTruncate(TokenTruncateConfig()),
    "token-mask": TokenMask(TokenMaskConfig()),
    "sequence-truncate": SequenceTruncate(SequenceTruncateConfig()),
    "sequence-mask": SequenceMask(SequenceMaskConfig()),
    "geometric-mask": GeometricMask(GeometricMaskConfig()),
}

# Two completions of three and two tokens, of a step of five tokens and two completions.
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
TOTALS = StepTotals(tokens=5, sequences=2, micro_batches=1, max_completion_length=3)
PI = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, 0.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.1, -1.8, -0.5], [-0.5, -1.4, 0.0]], dtype=torch.float64)
MU = torch.tensor([[-1.3, -1.7, NAN], [-0.4, -1.9, 0.0]], dtype=torch.float64)
ENTROPY = torch.tensor([[0.5, 1.0, 0.25], [0.75, 1.5, 0.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0], dtype=torch.float64)


def taken(step_loss: StepLoss, **given: Any) -> tuple[MicroBatchLoss, dict[str, Any]]:
    """The loss of the micro-batch after its backward pass, and the tensors that it is of."""
    held: dict[str, Any] = {"logprobs": PI, "entropy": ENTROPY, "advantages": ADVANTAGES} | given
    held |= {name: held[name].clone().requires_grad_() for name in ("logprobs", "entropy")}
    keep = held.pop("policy_keep", None)
    inputs = build_inputs(token_mask=MASK, **held)
    made = step_loss.micro_batch(inputs, TOTALS, held.get("sampler_logprobs"), keep)
    made.loss.backward()  # type: ignore[no-untyped-call]
    return made, held


def same(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype))


class Given:
    """A correction that keeps what it was given, and returns what it was made with."""

    def __init__(self, weights: Any = None, keep: Any = None) -> None:
        self.weights, self.keep = weights, keep

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        self.given = old, sampler, mask
        weights = torch.ones_like(old) if self.weights is None else torch.tensor(self.weights).double()
        return weights, mask if self.keep is None else torch.tensor(self.keep).bool()


class LogPi:
    """A loss of -A log pi, whose gradient is -A times the weight of the token."""

    reduction = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-inputs.advantages * inputs.logprobs)


class BySequence(LogPi):
    reduction = Reduction.SEQUENCE_MEAN


def test_the_step_loss_of_a_run_has_the_runs_settings() -> None:
    train = TrainConfig(beta=0.1, kl="k2", entropy_coef=0.2, off_policy_mask_threshold=0.3)
    assert StepLoss.of(DAPO, NONE, train) == StepLoss(DAPO, NONE, 0.1, "k2", 0.2, 0.3)


def test_a_loss_that_folds_the_correction_is_not_multiplied_by_it_again() -> None:
    class Folding(LogPi):
        folds_correction = True

        def per_token(self, inputs: LossInputs) -> LossOutput:
            assert inputs.correction_weights is not None
            return LossOutput(-inputs.advantages * inputs.logprobs * inputs.correction_weights)

    gradients = []
    for loss in (LogPi(), Folding()):
        _, given = taken(StepLoss(loss, Given([[3.0] * 3] * 2)))
        gradients.append(given["logprobs"].grad)
    same(gradients[1], [[-3 / 5] * 3, [3 / 5, 3 / 5, 0]])
    same(gradients[1], gradients[0])


# -- terms -----------------------------------------------------------------------------------------------


def test_the_weights_of_tokens_are_of_the_losss_reduction_in_the_dtype_of_log_pi() -> None:
    for loss, weights in (
        (LogPi(), [[-1 / 5] * 3, [1 / 5, 1 / 5, 0]]),
        (BySequence(), [[-1 / 6] * 3, [1 / 4, 1 / 4, 0]]),
    ):
        _, given = taken(StepLoss(loss, NONE))
        expected = torch.tensor(weights, dtype=torch.float64)
        torch.testing.assert_close(given["logprobs"].grad, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("loss", [LogPi(), BySequence()])
def test_the_bonus_is_a_mean_of_tokens_whatever_the_losss_own_reduction(loss: Any) -> None:
    """The entropies add up to 4, of 5 tokens."""
    with_bonus, given = taken(StepLoss(loss, NONE, entropy_coef=0.1))
    without, _ = taken(StepLoss(loss, NONE))
    assert (with_bonus.loss - without.loss).item() == pytest.approx(-0.1 * 4 / 5)
    same(given["entropy"].grad, [[-0.02] * 3, [-0.02, -0.02, 0]])


def test_before_the_first_update_the_old_policy_is_the_policy_without_its_gradient() -> None:
    correction = Given()
    made, _ = taken(StepLoss(DAPO, correction))
    assert not correction.given[0].requires_grad
    same(correction.given[0], PI)
    same(made.diagnostics["ratio"], [[1, 1, 1], [1, 1, 0]])
    moved, _ = taken(StepLoss(DAPO, correction), old_logprobs=OLD)
    same(correction.given[0], OLD)
    same(moved.diagnostics["ratio"], torch.where(MASK, (PI - OLD).exp(), 0.0))


# -- corrections -----------------------------------------------------------------------------------------


def test_a_correction_scales_kept_tokens_and_drops_the_others() -> None:
    correction = Given([[0.5, 3.0, NAN], [2.0, 1.0, 7.0]], [[1, 1, 0], [1, 0, 0]])
    made, given = taken(StepLoss(LogPi(), correction))
    same(given["logprobs"].grad, [[-0.1, -0.6, 0], [0.4, 0, 0]])
    same(made.terms()["correction R"], [[0.5, 3.0, 0], [2.0, 0, 0]])
    assert made.correction is not None
    weights, keep = made.correction
    same(keep, [[1, 1, 0], [1, 0, 0]])
    torch.testing.assert_close(weights, correction.correct(PI, PI, MASK)[0], equal_nan=True)


def test_a_correction_is_given_zeros_where_masked_and_pi_old_where_mu_is_unknown() -> None:
    garbage = torch.tensor(123.0).double()
    impossible = torch.where(MU == -0.4, -math.inf, MU)  # which is known
    old, sampler = torch.where(MASK, OLD, garbage), torch.where(MASK, impossible, garbage)
    correction = Given()
    taken(StepLoss(LogPi(), correction), old_logprobs=old, sampler_logprobs=sampler)
    same(correction.given[0], OLD)
    same(correction.given[1], [[-1.3, -1.7, -0.5], [-math.inf, -1.9, 0.0]])
    assert torch.equal(correction.given[2], MASK)


def test_the_weights_of_a_correction_have_no_gradient() -> None:
    class OfAParameter(Given):
        def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return torch.ones_like(old).requires_grad_() * 2, mask

    made, _ = taken(StepLoss(LogPi(), OfAParameter()))
    assert made.correction is not None
    assert not made.correction[0].requires_grad
    same(made.correction[0], [[2.0] * 3] * 2)


def test_a_correction_that_changes_what_it_is_given_ends_the_run_by_name() -> None:
    class InPlace(Given):
        def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return old.sub_(sampler).exp(), mask

    with pytest.raises(RunFailed, match="correction 'InPlace' must not change old in place"):
        taken(StepLoss(LogPi(), InPlace()), old_logprobs=OLD, sampler_logprobs=MU)


# -- tokens that are left out ----------------------------------------------------------------------------

# By (1/n) sum of log mu - log pi the second completion is (-0.1 + -0.4) / 2 = -0.25 away.


@pytest.mark.parametrize(("threshold", "keeps"), [(None, None), (0.0, True), (-0.3, False)])
def test_a_completion_too_far_off_is_left_out_and_told(threshold: float | None, keeps: bool | None) -> None:
    step_loss = StepLoss(LogPi(), NONE, off_policy_mask_threshold=threshold)
    made, given = taken(step_loss, sampler_logprobs=MU)
    if keeps is None:
        assert made.off_policy_keep is None
    else:
        assert made.off_policy_keep is not None
        assert (made.off_policy_keep & MASK).tolist() == [[True] * 3, [keeps, keeps, False]]
    kept = 0.2 if keeps is not False else 0.0
    same(given["logprobs"].grad, [[-0.2] * 3, [kept, kept, 0]])


def test_a_token_counts_that_both_masks_keep() -> None:
    chosen = torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()

    def counted(threshold: float | None, keep: Tensor | None) -> list[list[bool]]:
        step_loss = StepLoss(LogPi(), NONE, off_policy_mask_threshold=threshold)
        _, given = taken(step_loss, sampler_logprobs=MU, policy_keep=keep)
        found: list[list[bool]] = (given["logprobs"].grad != 0).tolist()
        return found

    assert counted(None, None) == [[True, True, True], [True, True, False]]
    assert counted(None, chosen) == [[True, False, True], [True, True, False]]
    assert counted(-0.3, None) == [[True, True, True], [False, False, False]]
    assert counted(-0.3, chosen) == [[True, False, True], [False, False, False]]


# -- corrections that are none ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda old, mask: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_step_loss.py"),
        (lambda old, mask: old, r"returned Tensor, not \(weights, keep\)"),
        (lambda old, mask: (old, mask, mask), r"returned tuple, not \(weights, keep\)"),
        (lambda old, mask: (2.0, mask), r"returned tuple, not \(weights, keep\)"),
        (
            lambda old, mask: (old[:, :1], mask),
            r"returned weights \(2, 1\) and keep \(2, 3\) of torch.bool; both are \[B, T\] \(2, 3\), ",
        ),
        (lambda old, mask: (old, mask[:1]), r"returned weights \(2, 3\) and keep \(1, 3\)"),
        (lambda old, mask: (old, old), r"returned weights \(2, 3\) and keep \(2, 3\) of torch.float32"),
    ],
)
def test_a_correction_that_is_none_is_named(make: Any, told: str) -> None:
    class Mine:
        def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Any:
            return make(old, mask)

    inputs = build_inputs(torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3).bool(), torch.ones(2))
    with pytest.raises(RunFailed, match=f"correction 'Mine' {told}"):
        StepLoss(DAPO, Mine()).micro_batch(inputs, StepTotals(6, 2, 1, 3))


def metrics_of(correction: Correction, made: MicroBatchLoss, sampler: Tensor) -> dict[str, Any]:
    """Mean, min and max over the tokens of all that a step measures."""
    batch: Any = SimpleNamespace(
        sampler_logprobs=sampler,
        token_places=torch.tensor([0, 1, 2, 3, 4]),
        trained_rows=torch.tensor([0, 1]),
        samples=(),
        host_mask=np.zeros((0, 3), bool),
    )
    metrics = measure([(batch, made)], correction).metrics
    return metrics.named(metrics.reduce(World(0, 1, CPU)))


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30, 0.0, -3.0])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_sampler_values_where_masked_change_nothing(name: str, garbage: float) -> None:
    correction, found = CORRECTIONS[name], []
    step_loss = StepLoss(DAPO, correction, off_policy_mask_threshold=0.05)
    for there in (-0.7, garbage):
        sampler = torch.where(MASK, MU, there)
        made, given = taken(step_loss, old_logprobs=OLD, sampler_logprobs=sampler)
        assert made.off_policy_keep is not None
        tensors = [
            made.loss.detach(),
            given["logprobs"].grad,
            made.inputs.old_logprobs,
            made.inputs.sampler_logprobs,
            made.terms()["correction R"],
            made.off_policy_keep,
            made.policy_loss,
            *made.diagnostics.values(),
        ]
        found.append((tensors, metrics_of(correction, made, sampler)))
    (expected, metrics), (tensors, others) = found
    assert all(map(torch.equal, tensors, expected))
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert others == metrics
