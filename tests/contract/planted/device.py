"""Components that create tensors on the CPU, though their inputs may be on another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import references as paper
import skeletons
import torch
from references import CISPO, GRPO, GSPO, SEQUENCE_TIS
from skeletons import clipped_loss, row_sums, sequences, tokens, totals
from torch import Tensor

PositionsOnCpu = tokens(None, lambda w, a: clipped_loss(w, a, 0.2, 0.28) * 0.99 ** torch.arange(w.shape[1]))
"""DAPO whose tokens fade by position, with torch.arange on the default device."""
SumsOnCpu = skeletons.clipped(
    skeletons.sequence_mean, GSPO, 3e-4, 4e-4,
    lambda d, mask: ((torch.zeros(len(d), 1, dtype=d.dtype) + row_sums(d)) / skeletons.lengths(mask)).exp(),
)  # fmt: skip
"""GSPO that gathers the sums of its sequences in torch.zeros on the default device."""
BoundsOnCpu = sequences(GRPO, lambda w, a: -torch.min(w * a, _bounded(w) * a))
"""GRPO whose clip bounds are a tensor by row, made from a list on the default device."""
ThroughNumpy = skeletons.surrogates(CISPO, lambda w, a: -torch.from_numpy(w.detach().numpy().clip(max=5.0)) * a)
"""Policy gradient whose weights make a detour by numpy, which reads the CPU's memory alone."""
PenaltyOnCpu = tokens(paper.capped(2.0), lambda w, a: -torch.minimum(w, _table(w)) * a)
"""Policy gradient that bounds ratios by a table of the batch on the default device."""


def _table(ratio: Tensor) -> Tensor:
    return torch.full((1, ratio.shape[1]), 2.0, dtype=ratio.dtype)


def _bounded(ratio: Tensor) -> Tensor:
    width = torch.tensor([[0.2]] * len(ratio), dtype=ratio.dtype)
    return torch.minimum(torch.maximum(ratio, 1 - width), 1 + width)


@skeletons.advantage(paper.centred)
def GroupTableOnCpu(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage that sums each group in torch.zeros on the default device."""
    total, scored = totals(rewards, weights)
    names, groups = group_ids.unique(return_inverse=True)
    sums = torch.zeros(len(names), dtype=torch.float64).index_add(0, groups, total)
    counts = torch.zeros(len(names), dtype=torch.float64).index_add(0, groups, scored.double())
    return torch.where(scored, total - (sums / counts.clamp(min=1))[groups], 0.0).float()


@skeletons.advantage(paper.ranked)
def RanksOnCpu(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages by rank in the group, with torch.arange on the default device."""
    total, scored = totals(rewards, weights)
    result = torch.zeros_like(total)
    for group in group_ids.unique():
        rows = (group_ids == group) & scored
        values = total[rows]
        if len(values) > 1:
            ranks = torch.sign(values[:, None] - values[None, :]).sum(dim=1)
            result[rows] = (ranks + 0 * torch.arange(len(values))) / len(values)
    return result.float()


@skeletons.correction(SEQUENCE_TIS)
def WeightsOnCpu(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence truncation whose weights are filled into torch.ones on the default device."""
    total = row_sums(torch.where(mask, old - sampler, 0.0)).clamp(-20, 20)
    weights = torch.ones(mask.shape, dtype=old.dtype) * total.exp().clamp(max=2.0)
    return weights, torch.ones(mask.shape, dtype=torch.bool)


@skeletons.descent
def MomentumOnCpu(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Momentum whose buffers are created on the default device."""
    if "momentum" not in state:
        state["momentum"] = torch.zeros(parameter.shape, dtype=parameter.dtype)
    state["momentum"].mul_(0.9).add_(parameter.grad)
    parameter.add_(state["momentum"], alpha=-group["lr"])


class LengthsOnCpu:
    """Reward of a scoring head whose weights stay on the CPU, while its inputs go to the accelerator."""

    isolation = "thread"

    def __init__(self) -> None:
        self._weight = torch.full((2, 1), 0.1)

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        features = torch.tensor([[float(len(ids)), 1.0] for ids in completion_ids], device=device)
        return [float(score) for score in (features @ self._weight).squeeze(-1)]
