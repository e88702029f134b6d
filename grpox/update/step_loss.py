"""A run's loss on one micro-batch, and the step normaliser: one weight per token, counted over the whole step.

Counts are taken over all micro-batches and ranks of an optimizer step, so that its gradient is a plain sum over
tokens, the same for every split into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpox.config import TrainConfig
from grpox.contracts import Correction, PolicyLoss, Reduction
from grpox.errors import RunFailed
from grpox.runtime.foreign_code import call, unchanged
from grpox.runtime.world import World
from grpox.update.objective import Corrected, LossTraits, MicroBatchInputs, MicroBatchLoss, objective
from grpox.update.token_masks import off_policy_keep


@dataclass(frozen=True)
class StepTotals:
    """Counts over one optimizer step, all ranks, taken before anything is dropped from the loss."""

    tokens: int
    sequences: int
    micro_batches: int
    max_completion_length: int


def count_masks(micro_batches: Iterable[Tensor | Sequence[np.ndarray]]) -> tuple[int, int, int]:
    """Tokens, sequences and micro-batches of token masks: bool[B, T] each, or a list of B bool[T]."""
    masks = list(micro_batches)
    return sum(int(row.sum()) for mask in masks for row in mask), sum(map(len, masks)), len(masks)


def count_step(
    micro_batches: Iterable[Tensor | Sequence[np.ndarray]], world: World, max_completion_length: int
) -> StepTotals:
    """Count a step from this rank's token masks, as `count_masks` takes them: one all-reduce."""
    counts = torch.tensor(count_masks(micro_batches), dtype=torch.float64, device=world.device)
    tokens, sequences, number = (int(n) for n in world.reduce(counts, dist.ReduceOp.SUM).tolist())
    return StepTotals(tokens, sequences, number, max_completion_length)


def token_weights(
    reduction: Reduction, mask: Tensor, totals: StepTotals, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight of every token in the loss of the step: bool[B, T] -> f32[B, T], 0 where masked.

    Args:
        reduction: how the loss declares that its tokens add up.
        mask: bool[B, T], one micro-batch on one rank.
        totals: counts over the whole step.
        dtype: of the weights, that of the log-probabilities.
    """
    m = mask.to(dtype)
    sequences = max(totals.sequences, 1)
    match reduction:
        case Reduction.TOKEN_MEAN:
            return m / max(totals.tokens, 1)
        case Reduction.SEQUENCE_MEAN:
            tokens = m.sum(dim=1, keepdim=True).clamp(min=1)  # f32[B, 1]
            return m / (tokens * sequences)
        case Reduction.SEQUENCE_SUM:
            return m / sequences
        case Reduction.SEQUENCE_SUM_BY_MAX_LENGTH:
            return m / (sequences * totals.max_completion_length)
        case Reduction.LOCAL_TOKEN_MEAN:
            return m / (m.sum().clamp(min=1) * max(totals.micro_batches, 1))


@dataclass(frozen=True)
class CorrectionTraits:
    """The declarations of a correction, read once where a run binds it."""

    weighs_by_raw: bool = True
    """Its weights are R, or R truncated, where it defines an R of its own."""
    raw: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(old, sampler, mask) -> R before any cap or mask; None: exp(old - sampler)."""

    @classmethod
    def of(cls, correction: Correction) -> CorrectionTraits:
        """Read them from `correction`."""
        return cls(getattr(correction, "weighs_by_raw", True), getattr(correction, "raw", None))


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
        """Bind the run's components with its settings."""
        return cls(
            policy_loss,
            correction,
            train.beta,
            train.kl,
            train.entropy_coef,
            train.off_policy_mask_threshold,
        )

    @cached_property
    def traits(self) -> LossTraits:
        """The declarations of the loss."""
        return LossTraits.of(self.policy_loss)

    @cached_property
    def correction_traits(self) -> CorrectionTraits:
        """The declarations of the correction."""
        return CorrectionTraits.of(self.correction)

    @property
    def entropy_gradient(self) -> bool:
        """True where the entropy has to have a gradient."""
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
            replace(
                inputs,
                policy_keep=_both(near, inputs.policy_keep),
                reference_logprobs=inputs.reference_logprobs if self.beta > 0 else None,
            ),
            weights(self.traits.reduction),
            factor=made.factor,
            folds_correction=self.traits.folds_correction,
            # Whatever the loss's own reduction, so that the coefficient means the same for all.
            bonus_weights=weights(Reduction.TOKEN_MEAN) * self.entropy_coef if self.entropy_coef else None,
            beta=self.beta,
            kl=self.kl,
        )
        return replace(output, inputs=inputs, corrected=made, off_policy_keep=near)

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
