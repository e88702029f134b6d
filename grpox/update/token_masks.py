"""Which tokens of an optimizer step have the highest entropy, over all its micro-batches and ranks.

Kept are those with `H >= quantile(1 - part)` of the step, so that the choice is the same however the step is
split. Source: "Beyond the 80/20 Rule", arXiv 2506.01939, which trains on the part 0.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from grpox.runtime.world import World

ROUNDING = 1e-4
"""The part by which entropies may differ that are the same. The first tokens of a group have one context, and
so one entropy, of which rounding makes one for each micro-batch: they are kept or left out together."""


@dataclass(frozen=True)
class Chosen:
    """The tokens of a step that its policy loss is made of."""

    keep: Sequence[Tensor]  # bool[B, T] of each micro-batch on this rank
    metrics: dict[str, float]


@torch.no_grad()
def choose(entropies: Sequence[Tensor], masks: Sequence[Tensor], part: float, world: World) -> Chosen:
    """Choose the tokens of a step; a collective.

    Args:
        entropies: f32[B, T] of each micro-batch on this rank.
        masks: bool[B, T] of each.
        part: of the step's tokens, from 0, which keeps the highest alone, to 1.
    """
    mine = torch.cat([values[mask] for values, mask in zip(entropies, masks, strict=True)])
    every = torch.cat(world.gather([mine.cpu()]))
    least = threshold(every, part)
    below = least - ROUNDING * abs(least) - 1e-6
    # Not ">= below": an entropy that is NaN is of a token whose loss is to tell it.
    keep = [~(values < below) for values in entropies]
    if not len(every):
        return Chosen(keep, {})
    kept = float((~(every < below)).double().mean())
    return Chosen(keep, {"top_entropy/threshold": least, "top_entropy/kept": kept})


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
