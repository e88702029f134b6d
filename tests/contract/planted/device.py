"""Components that create tensors on the CPU, though their inputs may be on another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import skeletons
import torch
from skeletons import clipped_loss, log_ratio_of, ratio_of, totals
from torch import Tensor

from grpox.contracts import LossInputs, Reduction


@skeletons.token_mean
def PositionsOnCpu(inputs: LossInputs) -> Tensor:
    """DAPO whose tokens fade by position, with torch.arange on the default device."""
    loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28)
    return loss * 0.99 ** torch.arange(loss.shape[1])


@skeletons.sequence_mean
def SumsOnCpu(inputs: LossInputs) -> Tensor:
    """GSPO that gathers the sums of its sequences in torch.zeros on the default device."""
    log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
    sums = torch.zeros(len(log_ratio), dtype=log_ratio.dtype) + log_ratio.sum(dim=1)
    ratio = (sums / inputs.token_mask.sum(dim=1).clamp(min=1)).exp().unsqueeze(1).expand_as(log_ratio)
    return clipped_loss(ratio, inputs.advantages, 3e-4, 4e-4)


@skeletons.sequence_mean
def BoundsOnCpu(inputs: LossInputs) -> Tensor:
    """GRPO whose clip bounds are a tensor by row, made from a list on the default device."""
    ratio, advantages = ratio_of(inputs), inputs.advantages
    width = torch.tensor([[0.2]] * len(ratio), dtype=ratio.dtype)
    clipped = torch.minimum(torch.maximum(ratio, 1 - width), 1 + width)
    return -torch.min(ratio * advantages, clipped * advantages)


@skeletons.surrogate(Reduction.TOKEN_MEAN)
def ThroughNumpy(inputs: LossInputs) -> Tensor:
    """Policy gradient whose weights make a detour by numpy, which reads the CPU's memory alone."""
    weights = torch.from_numpy(ratio_of(inputs).detach().numpy().clip(max=5.0))
    return -weights * inputs.advantages


@skeletons.advantage
def GroupTableOnCpu(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage that sums each group in torch.zeros on the default device."""
    total, scored = totals(rewards, weights)
    names, groups = group_ids.unique(return_inverse=True)
    sums = torch.zeros(len(names), dtype=torch.float64).index_add(0, groups, total)
    counts = torch.zeros(len(names), dtype=torch.float64).index_add(0, groups, scored.double())
    return torch.where(scored, total - (sums / counts.clamp(min=1))[groups], 0.0).float()


@skeletons.advantage
def RanksOnCpu(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages by rank in the group, with torch.arange on the default device."""
    total, scored = totals(rewards, weights)
    result = torch.zeros_like(total)
    for group in group_ids.unique():
        rows = (group_ids == group) & scored
        values = total[rows]
        if len(values) > 1:
            names, inverse, sizes = values.unique(return_inverse=True, return_counts=True)
            last = sizes.cumsum(0).double() - 1
            middle = last - (sizes - 1) / 2 - (len(values) - 1) / 2
            result[rows] = (middle + 0 * torch.arange(len(names)))[inverse] / len(values)
    return result.float()


@skeletons.correction
def WeightsOnCpu(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence truncation whose weights are filled into torch.ones on the default device."""
    total = torch.where(mask, old - sampler, 0.0).sum(dim=1, keepdim=True).clamp(-20, 20)
    weights = torch.ones(mask.shape, dtype=old.dtype) * total.exp().clamp(max=2.0)
    return weights, torch.ones(mask.shape, dtype=torch.bool)


@skeletons.descent
def MomentumOnCpu(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Momentum whose buffers are created on the default device."""
    if "momentum" not in state:
        state["momentum"] = torch.zeros(parameter.shape, dtype=parameter.dtype)
    state["momentum"].mul_(0.9).add_(parameter.grad)
    parameter.add_(state["momentum"], alpha=-group["lr"])


@skeletons.token_mean
def PenaltyOnCpu(inputs: LossInputs) -> Tensor:
    """Policy gradient that lessens repeated ratios by a table of the batch on the default device."""
    table = torch.full((1, inputs.logprobs.shape[1]), 0.5, dtype=inputs.logprobs.dtype)
    ratio = ratio_of(inputs)
    return -torch.minimum(ratio, table + 1.5) * inputs.advantages


class LengthsOnCpu:
    """Reward of a scoring head whose weights stay on the CPU, while its inputs go to the accelerator."""

    isolation = "thread"

    def __init__(self) -> None:
        self._weight = torch.full((2, 1), 0.1)

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        features = torch.tensor([[float(len(ids)), 1.0] for ids in completion_ids], device=device)
        return [float(score) for score in (features @ self._weight).squeeze(-1)]
