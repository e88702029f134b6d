"""Which completions the policy loss leaves out because the policy has moved away from them.

Kept is what has an advantage of 0 or more, and what is at most `threshold` away:

    (1/n_i) sum_t m[i,t] (log mu - sg[log pi]) <= threshold

log mu is what the generator reported when it sampled, so that the distance holds both what updates since then
and what other kernels have moved. Source: DeepSeek-V3.2, arXiv 2512.02556, eq. 9.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def off_policy_keep(
    logprobs: Tensor, sampler: Tensor | None, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Whether the policy loss of each token counts: bool[B, T], the same for all of a completion.

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
