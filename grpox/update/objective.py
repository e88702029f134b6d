"""The objective of a micro-batch: sum over tokens of weight * (R * loss + beta * KL) - bonus weight * entropy.

The core owns the mask, the correction R, the KL term, the bonus and the weights; a plugin owns `per_token`
alone. Masked positions are neutralised before the plugin sees them and after: multiplying by the mask would
turn a NaN there into a NaN gradient. What else a plugin does wrong is told with its name, not broadcast into a
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, PolicyLoss
from grpox.errors import RunFailed
from grpox.plugins.component import call, unchanged
from grpox.update.kl import KL_ESTIMATORS, k3

RESERVED = frozenset(
    {"loss", "grad_norm", "learning_rate", "entropy", "kl", "kl_old", "ratio", "off_policy_masked"}
)
"""Metrics of the core's own, which a diagnostic may not overwrite; nor may it begin with ``sampling/``."""


def per_token_loss(policy_loss: PolicyLoss, inputs: LossInputs) -> LossOutput:
    """The loss of every token.

    Raises:
        RunFailed: it raised, changed a tensor of `inputs` in place, or returned anything but a `LossOutput` of
            [B, T] tensors that the gradient of the log-probabilities can flow through.
    """
    name = type(policy_loss).__name__
    with unchanged("loss", policy_loss.per_token, vars(inputs)):
        output = call("loss", policy_loss.per_token, inputs)
    if not isinstance(output, LossOutput):
        raise RunFailed(f"loss '{name}' returned a {type(output).__name__}; per_token returns a LossOutput")
    _check_tensor(name, "its loss", output.loss, inputs)
    if inputs.logprobs.requires_grad and not output.loss.requires_grad:
        raise RunFailed(f"loss '{name}' does not depend on the log-probabilities: it would train nothing")
    for diagnostic, values in output.diagnostics.items():
        if diagnostic in RESERVED or diagnostic.startswith("sampling/"):
            raise RunFailed(f"loss '{name}': '{diagnostic}' is a metric of grpox's own; rename the diagnostic")
        _check_tensor(name, f"diagnostic '{diagnostic}'", values, inputs)
    return output


def _check_tensor(name: str, what: str, values: object, inputs: LossInputs) -> None:
    expected = tuple(inputs.logprobs.shape)
    if not isinstance(values, Tensor):
        raise RunFailed(f"loss '{name}': {what} is a {type(values).__name__}, not a tensor of shape {expected}")
    if values.shape != inputs.logprobs.shape:
        raise RunFailed(f"loss '{name}': {what} has shape {tuple(values.shape)}; [B, T] is {expected}")
    if what == "its loss" and not torch.is_floating_point(values):
        raise RunFailed(f"loss '{name}': {what} is of {values.dtype}, not of a floating-point type")


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
