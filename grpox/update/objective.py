"""The objective of a micro-batch: sum over tokens of weight * (R * loss + beta * KL) - bonus weight * entropy.

The core owns the mask, the correction R, the KL term, the bonus and the weights; a plugin owns `per_token`
alone. Masked positions are neutralised before the plugin sees them and after: multiplying by the mask would
turn a NaN there into a NaN gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpox.contracts import LossInputs, PolicyLoss
from grpox.update.kl import KL_ESTIMATORS, k3
from grpox.update.loss_call import per_token_loss


@dataclass(frozen=True)
class ObjectiveInputs:
    """All that the objective of one micro-batch depends on."""

    logprobs: Tensor  # f32[B, T], with gradient
    token_mask: Tensor  # bool[B, T]
    advantages: Tensor  # f32[B] or f32[B, T]
    token_weights: Tensor  # f32[B, T]: the step normaliser
    old_logprobs: Tensor | None = None  # f32[B, T]; None: no update since sampling, so it is sg[logprobs]
    reference_logprobs: Tensor | None = None  # f32[B, T], only when beta > 0
    entropy: Tensor | None = None  # f32[B, T], with gradient where there are bonus weights
    correction: Tensor | None = None  # f32[B, T]: R, 0 where a correction drops the token
    policy_keep: Tensor | None = None  # bool[B, T]: tokens whose policy term counts; None: all of them
    bonus_weights: Tensor | None = None  # f32[B, T]: those of the entropy in the step's loss; None: no bonus


@dataclass(frozen=True)
class ObjectiveOutput:
    """The loss to be minimised, and what was measured on the way."""

    loss: Tensor  # scalar
    diagnostics: Mapping[str, Tensor]  # name -> f32[B, T], without gradient, 0 where masked
    policy_loss: Tensor  # f32[B, T], what the plugin returned, without gradient, 0 where masked


def objective(
    policy_loss: PolicyLoss, inputs: ObjectiveInputs, beta: float = 0.0, kl: str = "k3"
) -> ObjectiveOutput:
    """This micro-batch's share of the step's loss; shares of all micro-batches and ranks simply add up.

    Args:
        beta: weight of the KL to the reference.
        kl: its estimator, one of `grpox.update.kl.KL_ESTIMATORS`.

    Raises:
        RunFailed: the loss raised or returned what is no loss.
    """
    mask, nothing = inputs.token_mask, inputs.logprobs.new_zeros(())

    def neutral(values: Tensor) -> Tensor:
        return torch.where(mask, values, nothing)

    logprobs = neutral(inputs.logprobs)
    old = logprobs.detach() if inputs.old_logprobs is None else neutral(inputs.old_logprobs)
    correction = None if inputs.correction is None else neutral(inputs.correction)
    entropy = None if inputs.entropy is None else neutral(inputs.entropy)
    folds_correction = getattr(policy_loss, "folds_correction", False)

    advantages = inputs.advantages if inputs.advantages.ndim == 2 else inputs.advantages.unsqueeze(1)
    output = per_token_loss(
        policy_loss,
        LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=neutral(advantages),
            token_mask=mask,
            entropy=None if entropy is None else entropy.detach(),
            correction_weights=correction if folds_correction else None,
        ),
    )
    per_token = neutral(output.loss)
    policy_loss_per_token = per_token.detach()
    if inputs.policy_keep is not None:
        per_token = torch.where(inputs.policy_keep, per_token, nothing)
    if correction is not None and not folds_correction:
        per_token = per_token * correction

    diagnostics = {name: neutral(values.detach()) for name, values in output.diagnostics.items()}
    diagnostics["kl_old"] = k3(old, logprobs.detach(), old)
    diagnostics["ratio"] = neutral(torch.exp(logprobs.detach() - old))
    if inputs.reference_logprobs is not None:
        reference = neutral(inputs.reference_logprobs)
        divergence = KL_ESTIMATORS[kl](reference, logprobs, old)
        diagnostics["kl"] = divergence.detach()
        per_token = per_token + beta * divergence
    loss = (per_token * inputs.token_weights).sum()
    if inputs.bonus_weights is not None and entropy is not None:
        loss = loss - (entropy * inputs.bonus_weights).sum()
    return ObjectiveOutput(loss, diagnostics, policy_loss_per_token)
