"""The step normaliser: one weight per token, from counts over all micro-batches and ranks of the step.

The gradient of a step is then a plain sum over tokens, the same for every split into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpox.contracts import Reduction
from grpox.runtime.world import World


@dataclass(frozen=True)
class StepTotals:
    """Counts over one optimizer step, all ranks, taken before anything is dropped from the loss."""

    tokens: int
    sequences: int
    micro_batches: int
    max_completion_length: int


def count_masks(token_masks: Iterable[Tensor]) -> tuple[int, int, int]:
    """Tokens, sequences and micro-batches of token masks (bool[B, T] each)."""
    masks = list(token_masks)
    return sum(int(mask.sum()) for mask in masks), sum(mask.shape[0] for mask in masks), len(masks)


def count_step(token_masks: Iterable[Tensor], world: World, max_completion_length: int) -> StepTotals:
    """Count a step from this rank's token masks (bool[B, T] each): one all-reduce."""
    counts = torch.tensor(count_masks(token_masks), dtype=torch.float64, device=world.device)
    tokens, sequences, micro_batches = (int(n) for n in world.reduce(counts, dist.ReduceOp.SUM).tolist())
    return StepTotals(tokens, sequences, micro_batches, max_completion_length)


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
