"""The objective of a micro-batch: sum over tokens of weight * (R * loss + beta * KL) - bonus weight * entropy.

The core owns the mask, the correction R, the KL term, the bonus and the weights; a plugin owns `per_token`
alone. Masked positions are neutralised before the plugin sees them and after: multiplying by the mask would
turn a NaN there into a NaN gradient. What else a plugin does wrong is told with its name, not broadcast into a
gradient.

KL(pi || ref) of each token is estimated from tokens that the policy sampled; rho = log ref - log pi. Source:
Schulman, "Approximating KL divergence" (2020), for k1, k2 and k3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""Metrics of the core's own, which a diagnostic may not overwrite; nor may it begin with ``mismatch/`` or
``sampling/``."""


@dataclass(frozen=True)
class MicroBatchInputs:
    """Log-probabilities and advantages of one micro-batch."""

    logprobs: Tensor  # f32[B, T], with gradient
    token_mask: Tensor  # bool[B, T]
    advantages: Tensor  # f32[B] or f32[B, T]
    old_logprobs: Tensor | None = None  # f32[B, T]; None: no update since sampling, so it is sg[logprobs]
    sampler_logprobs: Tensor | None = None  # f32[B, T], NaN where unknown; None: all are unknown
    reference_logprobs: Tensor | None = None  # f32[B, T], only when beta > 0 or the loss needs it
    entropy: Tensor | None = None  # f32[B, T], with gradient where there is a bonus or the loss needs one
    policy_keep: Tensor | None = None  # bool[B, T]: tokens whose policy term counts; None: all of them
    token_places: Tensor | None = None  # i64[N]: where token_mask is True, of B * T; None: nobody has counted
    # The following are None unless the loss needs them; see `grpox.contracts.LossInputs`.
    rewards: Tensor | None = None  # f32[B, K]
    group_ids: Tensor | None = None  # i64[B]
    sequence_ids: Tensor | None = None  # i64[B]
    columns: Mapping[str, Sequence[Any]] | None = None

    @property
    def token_advantages(self) -> Tensor:
        """f32[B, T], or f32[B, 1] where all tokens of a sequence have the same."""
        return self.advantages if self.advantages.ndim == 2 else self.advantages.unsqueeze(1)


@dataclass(frozen=True)
class Corrected:
    """Inputs and outputs of an importance-sampling correction."""

    old: Tensor  # f32[B, T]
    sampler: Tensor  # f32[B, T], equal to old where it is unknown
    weights: Tensor  # f32[B, T]
    keep: Tensor  # bool[B, T]

    @cached_property
    def factor(self) -> Tensor:
        """R f32[B, T]: the weight, 0 where the token is dropped."""
        return torch.where(self.keep, self.weights, 0.0)


@dataclass(frozen=True)
class MicroBatchLoss:
    """A micro-batch's share of the step's loss, and what was measured on the way."""

    inputs: MicroBatchInputs
    loss: Tensor  # scalar, to be minimised
    policy_loss: Tensor  # f32[B, T], as the plugin returned it, without gradient, 0 where masked
    diagnostics: Mapping[str, Tensor]  # name -> f32[B, T], without gradient, 0 where masked
    corrected: Corrected | None = None  # None: no correction
    off_policy_keep: Tensor | None = None  # bool[B, T]; None: the run leaves none out
    policy_share: Tensor | None = None  # scalar without gradient; None: the loss has no other term
    router_share: Tensor | None = None  # scalar without gradient: of the mean load-balancing loss of the step
    of_sequences: Mapping[str, Tensor] = field(default_factory=dict)  # diagnostics of sequences, f32[B] each

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
        """Return the same numbers without the graph that made them; call it after the backward pass.

        The derivative with respect to each log-probability, where there is one, becomes the term "derivative".
        """
        logprobs, entropy = self.inputs.logprobs, self.inputs.entropy
        inputs = replace(
            self.inputs, logprobs=logprobs.detach(), entropy=None if entropy is None else entropy.detach()
        )
        if logprobs.requires_grad and logprobs.grad is not None:
            inputs.logprobs.grad = logprobs.grad
        return replace(self, inputs=inputs, loss=self.loss.detach())

    def terms(self) -> dict[str, Tensor]:
        """Name the terms of the loss, causes first: name -> f32[B, T] without gradient."""
        inputs = self.inputs
        terms = {
            "reference log-probability": inputs.reference_logprobs,
            "log-probability": inputs.logprobs.detach(),
            "old log-probability": None if self.corrected is None else self.corrected.old,
            "entropy": None if inputs.entropy is None else inputs.entropy.detach(),
            "advantage": self.inputs.token_advantages.expand_as(inputs.logprobs),
            "correction R": None if self.corrected is None else self.corrected.factor,
            "policy loss": self.policy_loss,
            "KL": self.diagnostics.get("kl"),
            "derivative": inputs.logprobs.grad,
        }
        return {name: values for name, values in terms.items() if values is not None}


KlEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(reference, logprobs, old) f32[B, T] each -> f32[B, T]; the gradient is that with respect to logprobs."""


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

    Its gradient is that of the KL also for tokens that an older policy sampled; k3's own is not, and grows
    without bound for tokens that the policy has come to think unlikely.
    """
    return (logprobs - old).exp() * k3(reference, logprobs, old)


KL_ESTIMATORS: Mapping[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3, "unbiased": unbiased}
"""The names that `train.kl` takes."""


def per_token_loss(policy_loss: PolicyLoss, inputs: LossInputs) -> LossOutput:
    """The loss of every token.

    Raises:
        RunFailed: it raised, changed a tensor of `inputs` in place, or returned anything but a `LossOutput` of
            [B, T] tensors that the gradient of the log-probabilities can flow through; diagnostics may be [B].
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
    inputs: MicroBatchInputs,
    token_weights: Tensor,
    *,
    factor: Tensor | None = None,
    folds_correction: bool = False,
    bonus_weights: Tensor | None = None,
    beta: float = 0.0,
    kl: str = "k3",
    needs: Collection[str] = (),
) -> MicroBatchLoss:
    """This micro-batch's share of the step's loss; shares of all micro-batches and ranks simply add up.

    Args:
        token_weights: f32[B, T], the step normaliser.
        factor: f32[B, T], the correction R, 0 where it drops the token; None: no correction.
        folds_correction: the loss applies R itself.
        bonus_weights: f32[B, T], those of the entropy in the step's loss; None: no bonus.
        beta: weight of the KL to the reference.
        kl: its estimator, one of `KL_ESTIMATORS`.
        needs: capabilities that the loss needs; see `grpox.contracts.LossInputs`.

    Raises:
        RunFailed: the loss raised or returned what is no loss, or needs what `inputs` lack.
    """
    mask, nothing = inputs.token_mask, inputs.logprobs.new_zeros(())

    def neutral(values: Tensor) -> Tensor:
        return torch.where(mask, values, nothing)

    logprobs = neutral(inputs.logprobs)
    old = logprobs.detach() if inputs.old_logprobs is None else neutral(inputs.old_logprobs)
    correction = None if factor is None else neutral(factor)
    entropy = None if inputs.entropy is None else neutral(inputs.entropy)
    given = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=neutral(inputs.token_advantages),
        token_mask=mask,
        entropy=entropy if entropy is None or Capability.ENTROPY_GRADIENT in needs else entropy.detach(),
        correction_weights=correction if folds_correction else None,
        **_needed_inputs(policy_loss, inputs, old, needs),
    )
    output = per_token_loss(policy_loss, given)
    per_token = of_plugin = neutral(output.loss)
    if inputs.policy_keep is not None:
        per_token = torch.where(inputs.policy_keep, per_token, nothing)
    if correction is not None and not folds_correction:
        per_token = per_token * correction
    now = logprobs.detach()
    own = {name: values.detach() for name, values in output.diagnostics.items()}
    rows = {name: values for name, values in own.items() if values.ndim == 1}
    diagnostics = {name: neutral(values.reshape(len(values), -1)) for name, values in own.items()}
    # The tokens are pi_old's: KL(pi_old || pi). In the other direction k3 explodes where pi has left a token.
    diagnostics |= {"kl_old": k3(now, old, old), "ratio": neutral(torch.exp(now - old))}
    share = None
    if beta > 0 or bonus_weights is not None:
        share = (per_token.detach() * token_weights).sum()
    if inputs.reference_logprobs is not None:
        divergence = KL_ESTIMATORS[kl](neutral(inputs.reference_logprobs), logprobs, old)
        diagnostics["kl"] = divergence.detach()
        if beta > 0:  # otherwise only the loss itself needs the reference
            per_token = per_token + beta * divergence
    loss = (per_token * token_weights).sum()
    if bonus_weights is not None and entropy is not None:
        loss = loss - (entropy * bonus_weights).sum()
    return MicroBatchLoss(inputs, loss, of_plugin.detach(), diagnostics, policy_share=share, of_sequences=rows)


def _needed_inputs(
    policy_loss: PolicyLoss, inputs: MicroBatchInputs, old: Tensor, needs: Collection[str]
) -> dict[str, Any]:
    """Collect the inputs that only a loss that needs them is given: field of `LossInputs` -> its value.

    Args:
        old: f32[B, T], 0 where masked.

    Raises:
        RunFailed: it needs one that `inputs` lack.
    """
    if not needs:
        return {}
    reference, mask = inputs.reference_logprobs, inputs.token_mask
    known = {
        Capability.REFERENCE_LOGPROBS: None if reference is None else torch.where(mask, reference, 0.0),
        Capability.SAMPLER_LOGPROBS: _known_sampler(inputs.sampler_logprobs, old, mask),
        Capability.REWARDS: inputs.rewards,
        Capability.GROUP_IDS: inputs.group_ids,
        Capability.SEQUENCE_IDS: inputs.sequence_ids,
        Capability.COLUMNS: inputs.columns,
    }
    needed = {capability.value: values for capability, values in known.items() if capability in needs}
    if lacking := [name for name, values in needed.items() if values is None]:
        raise RunFailed(
            f"loss '{type(policy_loss).__name__}' needs {' and '.join(lacking)}, which these samples lack: "
            "they were made for another loss"
        )
    return needed


def _known_sampler(sampler: Tensor | None, old: Tensor, mask: Tensor) -> Tensor:
    """Replace unknown log-probabilities of the generator by pi_old: f32[B, T], 0 where masked.

    Args:
        sampler: f32[B, T], NaN where unknown; None: all are unknown.
        old: f32[B, T], 0 where masked.
    """
    return old if sampler is None else torch.where(sampler.isnan() | ~mask, old, sampler)


@dataclass(frozen=True)
class StepLoss:
    """The run's loss, correction, KL penalty, entropy bonus and mask of completions that are off-policy."""

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
        """True where the entropy has to have a gradient."""
        return self.entropy_coef > 0 or Capability.ENTROPY_GRADIENT in self.needs

    @property
    def needs_reference(self) -> bool:
        """True where the log-probabilities under the reference are used."""
        return self.beta > 0 or Capability.REFERENCE_LOGPROBS in self.needs

    def micro_batch(self, inputs: MicroBatchInputs, totals: StepTotals) -> MicroBatchLoss:
        """The share of one micro-batch; the shares of all micro-batches and ranks add up.

        Args:
            totals: counts over the whole step.

        Raises:
            RunFailed: the loss or the correction returned what is none.
        """
        mask = inputs.token_mask
        old = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        corrected = apply_correction(self.correction, old, inputs.sampler_logprobs, mask)
        keep, near = inputs.policy_keep, None
        if self.off_policy_mask_threshold is not None:
            near = off_policy_keep(
                inputs.logprobs,
                inputs.sampler_logprobs,
                inputs.advantages,
                mask,
                self.off_policy_mask_threshold,
            )
            keep = near if keep is None else near & keep
        weights = partial(token_weights, mask=mask, totals=totals, dtype=inputs.logprobs.dtype)
        output = objective(
            self.policy_loss,
            replace(
                inputs,
                policy_keep=keep,
                reference_logprobs=inputs.reference_logprobs if self.needs_reference else None,
            ),
            weights(self.traits.reduction),
            factor=corrected.factor,
            folds_correction=self.traits.folds_correction,
            # Whatever the loss's own reduction, so that the coefficient means the same for all.
            bonus_weights=weights(Reduction.TOKEN_MEAN) * self.entropy_coef if self.entropy_coef else None,
            beta=self.beta,
            kl=self.kl,
            needs=self.needs,
        )
        return replace(output, inputs=inputs, corrected=corrected, off_policy_keep=near)


def apply_correction(correction: Correction, old: Tensor, sampler: Tensor | None, mask: Tensor) -> Corrected:
    """Apply `correction` to a micro-batch.

    A missing sampler log-probability counts as equal to pi_old, and masked positions as 0.

    Args:
        old: f32[B, T], without gradient.
        sampler: f32[B, T], NaN where unknown; None: all are unknown.
        mask: bool[B, T].

    Raises:
        RunFailed: the correction raised, changed an argument in place, or returned what is none.
    """
    old = torch.where(mask, old, 0.0)
    known = _known_sampler(sampler, old, mask)
    name = type(correction).__name__
    with unchanged("correction", correction.correct, {"old": old, "sampler": known, "mask": mask}):
        result = call("correction", correction.correct, old, known, mask)
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not (is_pair and all(isinstance(part, Tensor) for part in result)):
        raise RunFailed(f"correction '{name}' returned {type(result).__name__}, not (weights, keep)")
    weights, keep = result
    if weights.shape != mask.shape or keep.shape != mask.shape or keep.dtype != torch.bool:
        raise RunFailed(
            f"correction '{name}' returned weights {tuple(weights.shape)} and "
            f"keep {tuple(keep.shape)} of {keep.dtype}; both are [B, T] {tuple(mask.shape)}, keep is bool"
        )
    return Corrected(old, known, weights.detach(), keep)
