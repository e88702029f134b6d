"""Masks of the policy loss: tokens with the highest entropy, and completions that are not off-policy.

The mask of tokens keeps those with `H >= quantile(1 - part)` over all micro-batches and ranks of an optimizer
step: every split of the step keeps the same tokens. Source: "Beyond the 80/20 Rule", arXiv 2506.01939, which
trains on the part 0.2.

The mask of completions keeps those with an advantage of 0 or more, and those whose distance to the policy is at
most `threshold`:

    (1/n_i) sum_t m[i,t] (log mu - sg[log pi]) <= threshold

log mu is what the generator reported when it sampled, so the distance includes later updates and differences
between kernels. Source: DeepSeek-V3.2, arXiv 2512.02556, eq. 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from grpox.runtime.world import World

ROUNDING = 1e-4
"""Relative difference up to which two entropies count as equal. The first tokens of a group share a context and
so an entropy, but each micro-batch rounds it differently. They are kept or dropped together."""


@torch.no_grad()
def choose(
    entropies: Sequence[Tensor], places: Sequence[Tensor], part: float, world: World
) -> tuple[list[Tensor], dict[str, float]]:
    """Choose the tokens of a step's policy loss; a collective.

    Args:
        entropies: f32[B, T] of each micro-batch on this rank.
        places: i64[N] of each, the places of its tokens among B * T.
        part: share of the step's tokens to keep; 0 keeps the highest alone, 1 all.

    Returns:
        bool[B, T] of each micro-batch on this rank, and metrics.
    """
    mine = torch.cat([v.flatten().index_select(0, p) for v, p in zip(entropies, places, strict=True)])
    every = torch.cat(world.gather([mine.cpu()]))
    least = threshold(every, part)
    below = least - ROUNDING * abs(least) - 1e-6
    # Not ">= below": a token whose entropy is NaN stays, so that its loss shows the NaN.
    keep = [~(values < below) for values in entropies]
    if not len(every):
        return keep, {}
    fraction = float((~(every < below)).double().mean())
    return keep, {"top_entropy/threshold": least, "top_entropy/kept": fraction}


def threshold(entropies: Tensor, part: float) -> float:
    """Compute quantile(1 - part) of entropies f32[n] without NaN; without any, -inf, which keeps all.

    Where the quantile lies between two entropies, the result is the larger one. It keeps the same tokens as an
    interpolated quantile, without rounding.
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
        advantages: f32[B] or f32[B, T]; in the latter each token has its own.
        mask: bool[B, T].
        threshold: nats per token.
    """
    if sampler is None:
        return torch.ones_like(mask)
    known = mask & ~sampler.isnan()
    apart = torch.where(known, sampler - logprobs, torch.zeros_like(logprobs))
    distance = apart.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)  # f32[B, 1]
    signs = advantages if advantages.ndim == 2 else advantages.unsqueeze(1)
    # Not "<= threshold": a completion whose log pi is NaN stays, so that the loss shows the NaN.
    return ((signs >= 0) | ~(distance > threshold)).expand_as(mask)
