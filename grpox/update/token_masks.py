"""Tokens and completions that the policy loss is taken over.

Of highest entropy, over all micro-batches and ranks of an optimizer step: those with `H >= quantile(1 - part)`,
so that the choice is the same however the step is split. Source: "Beyond the 80/20 Rule", arXiv 2506.01939,
which trains on the part 0.2.

Not off-policy: those with an advantage of 0 or more, and those that the policy has not moved further away from
than `threshold`:

    (1/n_i) sum_t m[i,t] (log mu - sg[log pi]) <= threshold

log mu is what the generator reported when it sampled, so that the distance holds both what updates since then
and what other kernels have moved. Source: DeepSeek-V3.2, arXiv 2512.02556, eq. 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from grpox.runtime.world import World

ROUNDING = 1e-4
"""The part by which entropies may differ that are the same. The first tokens of a group have one context, and
so one entropy, of which rounding makes one for each micro-batch: they are kept or left out together."""


@torch.no_grad()
def choose(
    entropies: Sequence[Tensor], places: Sequence[Tensor], part: float, world: World
) -> tuple[list[Tensor], dict[str, float]]:
    """Choose the tokens that the policy loss of a step is made of; a collective.

    Args:
        entropies: f32[B, T] of each micro-batch on this rank.
        places: i64[N] of each, where its tokens lie, of B * T.
        part: of the step's tokens, from 0, which keeps the highest alone, to 1.

    Returns:
        bool[B, T] of each micro-batch on this rank, and metrics.
    """
    mine = torch.cat([v.flatten().index_select(0, p) for v, p in zip(entropies, places, strict=True)])
    every = torch.cat(world.gather([mine.cpu()]))
    least = threshold(every, part)
    below = least - ROUNDING * abs(least) - 1e-6
    # Not ">= below": an entropy that is NaN is of a token whose loss is to tell it.
    keep = [~(values < below) for values in entropies]
    if not len(every):
        return keep, {}
    fraction = float((~(every < below)).double().mean())
    return keep, {"top_entropy/threshold": least, "top_entropy/kept": fraction}


def threshold(entropies: Tensor, part: float) -> float:
    """quantile(1 - part) of entropies f32[n], NaN left out; of none -inf, which keeps all.

    Between two entropies the quantile would be interpolated. No entropy lies between them, so that the larger
    of the two keeps the same tokens, without rounding.
    """
    known = entropies[~entropies.isnan()]
    if not len(known):
        return -math.inf
    # As the decimal number the user wrote: 1 - 0.7 is more than 0.3 in floating point.
    place = math.ceil((1 - Fraction(str(part))) * (len(known) - 1))
    return float(known.kthvalue(place + 1).values)


@torch.no_grad()
def off_policy_keep(
    logprobs: Tensor, sampler: Tensor | None, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return bool[B, T], True where the policy loss of a token counts; the same for all of a completion.

    Args:
        logprobs: f32[B, T], log pi.
        sampler: f32[B, T], log mu, NaN where unknown, which counts as equal to log pi; None: all are unknown.
        advantages: f32[B] or f32[B, T], of which each token's own counts.
        mask: bool[B, T].
        threshold: nats per token.
    """
    if sampler is None:
        return torch.ones_like(mask)
    known = mask & ~sampler.isnan()
    apart = torch.where(known, sampler - logprobs, torch.zeros_like(logprobs))
    distance = apart.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)  # f32[B, 1]
    signs = advantages if advantages.ndim == 2 else advantages.unsqueeze(1)
    # Not "<= threshold": a log pi that is NaN is to be found in the loss, and not left out of it.
    return ((signs >= 0) | ~(distance > threshold)).expand_as(mask)
