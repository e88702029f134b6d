"""What an optimizer step minimises, micro-batch by micro-batch: correction, token weights and objective.

`PolicyUpdate` runs it on what the model computes, `grpox.testing.step_gradient` on given tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from grpox.config import TrainConfig
from grpox.contracts import Correction, PolicyLoss, Reduction
from grpox.errors import RunFailed
from grpox.plugins.component import call, unchanged
from grpox.update.objective import ObjectiveInputs, objective
from grpox.update.reduction import StepTotals, token_weights
from grpox.update.token_masks import off_policy_keep


@dataclass(frozen=True)
class MicroBatchInputs:
    """Log-probabilities and advantages of one micro-batch."""

    logprobs: Tensor  # f32[B, T], with gradient
    token_mask: Tensor  # bool[B, T]
    advantages: Tensor  # f32[B] or f32[B, T]
    old_logprobs: Tensor | None = None  # f32[B, T]; None: no update since sampling, so it is sg[logprobs]
    sampler_logprobs: Tensor | None = None  # f32[B, T], NaN where unknown; None: all are unknown
    reference_logprobs: Tensor | None = None  # f32[B, T], only when beta > 0
    entropy: Tensor | None = None  # f32[B, T], with gradient where there is a bonus
    policy_keep: Tensor | None = None  # bool[B, T]: tokens whose policy term counts; None: all of them


@dataclass(frozen=True)
class Corrected:
    """What a correction was given and made of it."""

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

    loss: Tensor  # scalar
    diagnostics: Mapping[str, Tensor]  # name -> f32[B, T], without gradient, 0 where masked
    corrected: Corrected
    policy_loss: Tensor  # f32[B, T], what the plugin returned, without gradient, 0 where masked
    off_policy_keep: Tensor | None = None  # bool[B, T]; None: the run leaves none out


@dataclass(frozen=True)
class StepLoss:
    """The run's loss, correction, KL penalty, entropy bonus and mask of completions that are off-policy."""

    policy_loss: PolicyLoss
    correction: Correction
    beta: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None

    @classmethod
    def of(cls, policy_loss: PolicyLoss, correction: Correction, train: TrainConfig) -> StepLoss:
        """That of a run: its components, and its settings."""
        return cls(
            policy_loss,
            correction,
            train.beta,
            train.kl,
            train.entropy_coef,
            train.off_policy_mask_threshold,
        )

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy has to have a gradient."""
        return self.entropy_coef > 0

    def micro_batch(self, inputs: MicroBatchInputs, totals: StepTotals) -> MicroBatchLoss:
        """The share of one micro-batch; the shares of all micro-batches and ranks add up.

        Args:
            totals: counts over the whole step.

        Raises:
            RunFailed: the loss or the correction returned what is none.
        """
        mask = inputs.token_mask
        old = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        made = corrected(self.correction, old, inputs.sampler_logprobs, mask)
        near = self._near(inputs)
        weights = partial(token_weights, mask=mask, totals=totals, dtype=inputs.logprobs.dtype)
        output = objective(
            self.policy_loss,
            ObjectiveInputs(
                logprobs=inputs.logprobs,
                token_mask=mask,
                advantages=inputs.advantages,
                token_weights=weights(self.policy_loss.reduction),
                old_logprobs=inputs.old_logprobs,
                reference_logprobs=inputs.reference_logprobs if self.beta > 0 else None,
                entropy=inputs.entropy,
                correction=made.factor,
                policy_keep=_both(near, inputs.policy_keep),
                # Whatever the loss's own reduction, so that the coefficient means the same for all.
                bonus_weights=weights(Reduction.TOKEN_MEAN) * self.entropy_coef if self.entropy_coef else None,
            ),
            self.beta,
            self.kl,
        )
        return MicroBatchLoss(output.loss, output.diagnostics, made, output.policy_loss, near)

    def _near(self, inputs: MicroBatchInputs) -> Tensor | None:
        if self.off_policy_mask_threshold is None:
            return None
        return off_policy_keep(
            inputs.logprobs,
            inputs.sampler_logprobs,
            inputs.advantages,
            inputs.token_mask,
            self.off_policy_mask_threshold,
        )


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """bool[B, T]: what both keep; None keeps all."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def corrected(correction: Correction, old: Tensor, sampler: Tensor | None, mask: Tensor) -> Corrected:
    """What `correction` makes of a micro-batch.

    A missing sampler log-probability counts as equal to pi_old, and masked positions as 0.

    Args:
        old: f32[B, T], without gradient.
        sampler: f32[B, T], NaN where unknown; None: all are unknown.
        mask: bool[B, T].

    Raises:
        RunFailed: the correction raised, changed an argument in place, or returned what is none.
    """
    old = torch.where(mask, old, 0.0)
    known = old if sampler is None else torch.where(sampler.isnan() | ~mask, old, sampler)
    name = type(correction).__name__
    with unchanged("correction", correction.correct, {"old": old, "sampler": known, "mask": mask}):
        made = call("correction", correction.correct, old, known, mask)
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, Tensor) for part in made)):
        raise RunFailed(f"correction '{name}' returned {type(made).__name__}, not (weights, keep)")
    weights, keep = made
    if weights.shape != mask.shape or keep.shape != mask.shape or keep.dtype != torch.bool:
        raise RunFailed(
            f"correction '{name}' returned weights {tuple(weights.shape)} and "
            f"keep {tuple(keep.shape)} of {keep.dtype}; both are [B, T] {tuple(mask.shape)}, keep is bool"
        )
    return Corrected(old, known, weights.detach(), keep)
