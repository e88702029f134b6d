"""The objective of a micro-batch: sum over tokens of weight * (R * loss + beta * KL) - bonus weight * entropy.

The core owns the mask, the correction R, the KL term, the bonus and the weights; a plugin owns `per_token`
alone. Masked positions are neutralised before the plugin sees them and after: multiplying by the mask would
turn a NaN there into a NaN gradient. Any other mistake of a plugin is reported with its name, and not broadcast
into a gradient.

KL(pi || ref) of each token is estimated from tokens that the policy sampled; rho = log ref - log pi. Source:
Schulman, "Approximating KL divergence" (2020), for k1, k2 and k3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from grpox.config import TrainConfig
from grpox.contracts import Capability, Correction, LossInputs, LossOutput, PolicyLoss, Reduction
from grpox.errors import RunFailed
from grpox.runtime.foreign_code import call, unchanged
from grpox.update.packing import LossTraits, StepTotals, token_weights
from grpox.update.token_masks import off_policy_keep

RESERVED = frozenset(("loss", "policy_loss", "entropy_coef", "adaptive_entropy/coef", "router_aux_loss"))
RESERVED |= {"grad_norm", "learning_rate", "entropy", "kl", "kl_old", "ratio", "off_policy_masked"}
"""Names of the core's own metrics. A diagnostic may have none of these, nor begin with ``mismatch/`` or
``sampling/``."""
ON_DEMAND = (
    *(Capability.REFERENCE_LOGPROBS, Capability.SAMPLER_LOGPROBS, Capability.REWARDS, Capability.GROUP_IDS),
    *(Capability.SEQUENCE_IDS, Capability.COLUMNS),
)
"""Fields of `LossInputs` that only a loss that needs them is given."""


def build_inputs(
    logprobs: Tensor,
    token_mask: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    **others: Any,
) -> LossInputs:
    """Collect the tensors of a micro-batch, with 0 at masked positions.

    Args:
        logprobs: f32[B, T].
        token_mask: bool[B, T].
        advantages: f32[B] or f32[B, T].
        old_logprobs: f32[B, T]; None: no update since sampling, so it is sg[logprobs].
        sampler_logprobs: f32[B, T], NaN where unknown, which counts as pi_old; None: all are unknown.
        reference_logprobs, entropy: f32[B, T] each.
        others: further fields of `LossInputs`, without token positions.
    """
    nothing = logprobs.new_zeros(())

    def neutral(values: Tensor | None) -> Any:
        return None if values is None else torch.where(token_mask, values, nothing)

    now = neutral(logprobs)
    old = now.detach() if old_logprobs is None else neutral(old_logprobs)
    sampler = old
    if sampler_logprobs is not None:
        sampler = torch.where(sampler_logprobs.isnan() | ~token_mask, old, sampler_logprobs)
    return LossInputs(
        logprobs=now,
        old_logprobs=old,
        advantages=neutral(advantages if advantages.ndim == 2 else advantages.unsqueeze(1)),
        token_mask=token_mask,
        entropy=neutral(entropy),
        reference_logprobs=neutral(reference_logprobs),
        sampler_logprobs=sampler,
        **others,
    )


@dataclass(frozen=True)
class MicroBatchLoss:
    """A micro-batch's share of the step's loss, with its measurements; 0 where masked."""

    inputs: LossInputs  # all inputs; the loss was given only the needed ones
    loss: Tensor  # scalar, to be minimised
    policy_loss: Tensor  # f32[B, T], as the plugin returned it, without gradient
    diagnostics: Mapping[str, Tensor]  # name -> f32[B, T], without gradient
    of_sequences: Mapping[str, Tensor]  # name -> f32[B], diagnostics with one number a sequence
    policy_share: Tensor | None = None  # scalar without gradient; None: the loss has no other term
    router_share: Tensor | None = None  # scalar without gradient: share of the mean load-balancing loss
    correction: tuple[Tensor, Tensor] | None = None  # weights f32[B, T]; bool[B, T], False where it drops
    policy_keep: Tensor | None = None  # bool[B, T]: tokens whose policy term counts; None: all of them
    off_policy_keep: Tensor | None = None  # bool[B, T]: tokens that are not off-policy; None: no such mask
    derivative: Tensor | None = None  # f32[B, T], of the loss by each log-probability; None before `detached`

    def with_routers(self, balance: Tensor, coefficient: float, totals: StepTotals) -> MicroBatchLoss:
        """Add the load-balancing loss of the micro-batch, weighted by its part of the step's tokens.

        Args:
            balance: scalar, the loss.
            coefficient: its weight.
            totals: counts over the whole step.
        """
        share = token_weights(Reduction.TOKEN_MEAN, self.inputs.token_mask, totals).sum() * balance
        policy = self.loss.detach() if self.policy_share is None else self.policy_share
        loss = self.loss + coefficient * share
        return replace(self, loss=loss, policy_share=policy, router_share=share.detach())

    def detached(self) -> MicroBatchLoss:
        """Return the same numbers without the graph that made them; call it after the backward pass."""
        logprobs, entropy = self.inputs.logprobs, self.inputs.entropy
        entropy = None if entropy is None else entropy.detach()
        inputs = replace(self.inputs, logprobs=logprobs.detach(), entropy=entropy)
        derivative = logprobs.grad if logprobs.retains_grad else None
        return replace(self, inputs=inputs, loss=self.loss.detach(), derivative=derivative)

    def terms(self) -> dict[str, Tensor]:
        """Name the terms of a detached loss, causes first: name -> f32[B, T]."""
        inputs, correction = self.inputs, self.correction
        terms = {
            "reference log-probability": inputs.reference_logprobs,
            "log-probability": inputs.logprobs,
            "old log-probability": inputs.old_logprobs,
            "entropy": inputs.entropy,
            "advantage": inputs.advantages,
            "correction R": None if correction is None else _factor(*correction),
            "policy loss": self.policy_loss,
            "KL": self.diagnostics.get("kl"),
            "derivative": self.derivative,
        }
        return {name: values for name, values in terms.items() if values is not None}


def _factor(weights: Tensor, keep: Tensor) -> Tensor:
    """R f32[B, T]: the correction's weight, 0 where it drops the token."""
    return torch.where(keep, weights, 0.0)


KlEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(reference, logprobs, old) f32[B, T] each -> f32[B, T], differentiable in logprobs."""


def k1(reference: Tensor, logprobs: Tensor, old: Tensor) -> Tensor:
    """``-rho``: unbiased in value, of high variance, negative for half of the tokens."""
    return logprobs - reference


def k2(reference: Tensor, logprobs: Tensor, old: Tensor) -> Tensor:
    """``rho^2 / 2``: biased in value, with the right gradient on-policy."""
    return (reference - logprobs).square() / 2


def k3(reference: Tensor, logprobs: Tensor, old: Tensor) -> Tensor:
    """``exp(rho) - rho - 1``: unbiased in value and never negative (GRPO, arXiv 2402.03300, eq. 4)."""
    rho = reference - logprobs
    return torch.expm1(rho) - rho


def unbiased(reference: Tensor, logprobs: Tensor, old: Tensor) -> Tensor:
    """``(pi / pi_old) k3``, the ratio neither clipped nor detached (DeepSeek-V3.2, arXiv 2512.02556).

    Its gradient is the KL's gradient, even for tokens that an older policy sampled. The gradient of k3 is not,
    and it grows without bound for tokens that have become unlikely under the policy.
    """
    return (logprobs - old).exp() * k3(reference, logprobs, old)


KL_ESTIMATORS: Mapping[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3, "unbiased": unbiased}
"""The names that `train.kl` takes."""


def per_token_loss(policy_loss: PolicyLoss, inputs: LossInputs) -> LossOutput:
    """Compute the loss of every token, and check it.

    Raises:
        RunFailed: the loss raised, changed a tensor of `inputs`, or returned anything but a `LossOutput`
            of [B, T] tensors through which the gradient can flow; diagnostics may be [B].
    """
    name = type(policy_loss).__name__
    tensors = {name: values for name, values in vars(inputs).items() if isinstance(values, Tensor)}
    with unchanged("loss", policy_loss.per_token, tensors):
        output = call("loss", policy_loss.per_token, inputs)
    if not isinstance(output, LossOutput):
        raise RunFailed(f"loss '{name}' returned a {type(output).__name__}; per_token returns a LossOutput")
    _check_tensor(name, "its loss", output.loss, inputs)
    if inputs.logprobs.requires_grad and not output.loss.requires_grad:
        raise RunFailed(f"loss '{name}' does not depend on the log-probabilities: it would train nothing")
    for diagnostic, values in output.diagnostics.items():
        if diagnostic in RESERVED or diagnostic.startswith(("mismatch/", "sampling/")):
            raise RunFailed(f"loss '{name}': '{diagnostic}' is a metric of grpox's own; rename the diagnostic")
        _check_tensor(name, f"diagnostic '{diagnostic}'", values, inputs)
    return output


def _check_tensor(name: str, what: str, values: object, inputs: LossInputs) -> None:
    expected = tuple(inputs.logprobs.shape)
    if not isinstance(values, Tensor):
        raise RunFailed(f"loss '{name}': {what} is a {type(values).__name__}, not a tensor of shape {expected}")
    if values.shape != inputs.logprobs.shape and (what == "its loss" or values.shape != expected[:1]):
        raise RunFailed(f"loss '{name}': {what} has shape {tuple(values.shape)}; [B, T] is {expected}")
    if what == "its loss" and not torch.is_floating_point(values):
        raise RunFailed(f"loss '{name}': {what} is of {values.dtype}, not of a floating-point type")


def objective(
    policy_loss: PolicyLoss,
    inputs: LossInputs,
    token_weights: Tensor,
    *,
    policy_keep: Tensor | None = None,
    factor: Tensor | None = None,
    folds_correction: bool = False,
    bonus_weights: Tensor | None = None,
    beta: float = 0.0,
    kl: str = "k3",
    needs: Collection[str] = (),
) -> MicroBatchLoss:
    """Compute a micro-batch's share of the step's loss; the shares of all micro-batches and ranks add up.

    Args:
        inputs: result of `build_inputs`; the KL is measured if they have a reference.
        token_weights: f32[B, T], the step normaliser.
        policy_keep: bool[B, T], tokens whose policy term counts; None: all of them.
        factor: f32[B, T], the correction R, 0 where it drops the token; None: no correction.
        folds_correction: the loss applies R itself.
        bonus_weights: f32[B, T], weights of the entropy in the step's loss; None: no bonus.
        beta: weight of the KL to the reference.
        kl: its estimator, one of `KL_ESTIMATORS`.
        needs: capabilities that the loss needs; see `grpox.contracts.LossInputs`.

    Raises:
        RunFailed: the loss raised, returned no valid loss, or needs an input that is missing.
    """
    mask, old, nothing = inputs.token_mask, inputs.old_logprobs, inputs.logprobs.new_zeros(())
    correction = None if factor is None else torch.where(mask, factor, nothing)
    own = _needed_inputs(policy_loss, inputs, needs)
    if folds_correction:
        own = replace(own, correction_weights=correction)
    output = per_token_loss(policy_loss, own)
    per_token = of_plugin = torch.where(mask, output.loss, nothing)
    if policy_keep is not None:
        per_token = torch.where(policy_keep, per_token, nothing)
    if correction is not None and not folds_correction:
        per_token = per_token * correction
    now = inputs.logprobs.detach()
    diagnostics: dict[str, Tensor] = {}
    of_sequences: dict[str, Tensor] = {}
    for name, values in output.diagnostics.items():
        if values.ndim == 1:
            of_sequences[name] = values.detach()
        else:
            diagnostics[name] = torch.where(mask, values.detach(), nothing)
    # pi_old sampled the tokens: KL(pi_old || pi). The other direction explodes where pi avoids a token.
    diagnostics |= {"kl_old": k3(now, old, old), "ratio": torch.where(mask, torch.exp(now - old), nothing)}
    share = None
    if beta > 0 or bonus_weights is not None:
        share = (per_token.detach() * token_weights).sum()
    if inputs.reference_logprobs is not None:
        divergence = KL_ESTIMATORS[kl](inputs.reference_logprobs, inputs.logprobs, old)
        diagnostics["kl"] = divergence.detach()
        if beta > 0:  # otherwise only the loss itself needs the reference
            per_token = per_token + beta * divergence
    loss = (per_token * token_weights).sum()
    if bonus_weights is not None and inputs.entropy is not None:
        loss = loss - (inputs.entropy * bonus_weights).sum()
    return MicroBatchLoss(inputs, loss, of_plugin.detach(), diagnostics, of_sequences, share)


def _needed_inputs(policy_loss: PolicyLoss, inputs: LossInputs, needs: Collection[str]) -> LossInputs:
    """Remove inputs that the loss does not need, and the gradient of the entropy if it needs none.

    Raises:
        RunFailed: the loss needs an input that is missing.
    """
    left_out: dict[str, Any] = {}
    lacking: list[str] = []
    for name in ON_DEMAND:
        if name not in needs:
            left_out[name] = None
        elif getattr(inputs, name) is None:
            lacking.append(name)
    if lacking:
        raise RunFailed(
            f"loss '{type(policy_loss).__name__}' needs {' and '.join(lacking)}, which these samples lack: "
            "they were made for another loss"
        )
    if inputs.entropy is not None and Capability.ENTROPY_GRADIENT not in needs:
        left_out["entropy"] = inputs.entropy.detach()
    return replace(inputs, **left_out)


@dataclass(frozen=True)
class StepLoss:
    """The run's loss, correction, KL penalty, entropy bonus and mask of off-policy completions."""

    policy_loss: PolicyLoss
    correction: Correction
    beta: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    needs: frozenset[str] = frozenset()
    """Capabilities that the loss needs."""

    @classmethod
    def of(
        cls, policy_loss: PolicyLoss, correction: Correction, train: TrainConfig, needs: Collection[str] = ()
    ) -> StepLoss:
        """Bind the run's components with its settings."""
        return cls(
            policy_loss,
            correction,
            train.beta,
            train.kl,
            train.entropy_coef,
            train.off_policy_mask_threshold,
            frozenset(needs),
        )

    @cached_property
    def traits(self) -> LossTraits:
        """The declarations of the loss."""
        return LossTraits.of(self.policy_loss)

    @property
    def entropy_gradient(self) -> bool:
        """True if the entropy needs a gradient."""
        return self.entropy_coef > 0 or Capability.ENTROPY_GRADIENT in self.needs

    @property
    def needs_reference(self) -> bool:
        """True if the log-probabilities under the reference are used."""
        return self.beta > 0 or Capability.REFERENCE_LOGPROBS in self.needs

    def micro_batch(
        self,
        inputs: LossInputs,
        totals: StepTotals,
        sampler: Tensor | None = None,
        policy_keep: Tensor | None = None,
    ) -> MicroBatchLoss:
        """Compute the share of one micro-batch; the shares of all micro-batches and ranks add up.

        Args:
            inputs: result of `build_inputs`.
            totals: counts over the whole step.
            sampler: f32[B, T] as the generator reported it, NaN where unknown; None: all are unknown.
            policy_keep: bool[B, T], tokens that the step chose for the policy term; None: all of them.

        Raises:
            RunFailed: see `objective` and `apply_correction`.
        """
        mask, near = inputs.token_mask, None
        if not self.needs_reference:
            inputs = replace(inputs, reference_logprobs=None)
        correction = apply_correction(self.correction, inputs)
        if (threshold := self.off_policy_mask_threshold) is not None:
            near = off_policy_keep(inputs.logprobs, sampler, inputs.advantages, mask, threshold)
            policy_keep = near if policy_keep is None else near & policy_keep
        weigh = partial(token_weights, mask=mask, totals=totals, dtype=inputs.logprobs.dtype)
        result = objective(
            self.policy_loss,
            inputs,
            weigh(self.traits.reduction),
            policy_keep=policy_keep,
            factor=_factor(*correction),
            folds_correction=self.traits.folds_correction,
            # The same reduction for every loss, so that a coefficient means the same for all.
            bonus_weights=weigh(Reduction.TOKEN_MEAN) * self.entropy_coef if self.entropy_coef else None,
            beta=self.beta,
            kl=self.kl,
            needs=self.needs,
        )
        return replace(result, correction=correction, policy_keep=policy_keep, off_policy_keep=near)


def apply_correction(correction: Correction, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Apply `correction` to a micro-batch, the result of `build_inputs`.

    Returns:
        weights f32[B, T] without gradient; keep bool[B, T].

    Raises:
        RunFailed: the correction raised, changed an argument in place, or returned no weights and keep.
    """
    mask, name = inputs.token_mask, type(correction).__name__
    arguments = {"old": inputs.old_logprobs, "sampler": inputs.sampler_logprobs, "mask": mask}
    with unchanged("correction", correction.correct, arguments):
        result = call("correction", correction.correct, *arguments.values())
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[0], Tensor) or not isinstance(result[1], Tensor):
        raise RunFailed(f"correction '{name}' returned {type(result).__name__}, not (weights, keep)")
    weights, keep = result
    if weights.shape != mask.shape or keep.shape != mask.shape or keep.dtype != torch.bool:
        raise RunFailed(
            f"correction '{name}' returned weights {tuple(weights.shape)} and "
            f"keep {tuple(keep.shape)} of {keep.dtype}; both are [B, T] {tuple(mask.shape)}, keep is bool"
        )
    return weights.detach(), keep
