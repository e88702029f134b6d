"""The importance ratio `w = pi / pi_old`, of each token or of each sequence, and the clipped surrogate of it.

Token level: `w[i,t] = exp(log pi - log pi_old)`.
Sequence level: `w_i = exp((1/n_i) sum_t m (log pi - log pi_old))` (GSPO, arXiv 2507.18071).
Clipped: `-min(w~ A, clip(w, 1-clip_low, 1+clip_high) A)`, `w~ = min(w, delta)` or w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput
from grpox_losses.configs import ClippedConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this either way: past it the ratio (4.9e8) heads for overflow, and an infinite
ratio makes the gradient NaN even on the branch that was not chosen (0 * inf)."""


def token_ratio(inputs: LossInputs) -> Tensor:
    """The ratio of each token: f32[B, T]."""
    return _bounded_exp(inputs.logprobs - inputs.old_logprobs)


def sequence_ratio(inputs: LossInputs) -> Tensor:
    """The geometric mean of each sequence's token ratios, at every position: f32[B, T].

    It is 1 for a sequence without unmasked tokens. Its gradient reaches every unmasked token.
    """
    log_ratios = torch.where(inputs.token_mask, inputs.logprobs - inputs.old_logprobs, 0.0)  # f32[B, T]
    lengths = inputs.token_mask.sum(dim=-1, keepdim=True).clamp(min=1)  # i64[B, 1]
    mean = log_ratios.sum(dim=-1, keepdim=True) / lengths  # f32[B, 1]
    return _bounded_exp(mean).expand_as(inputs.logprobs)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(inputs: LossInputs, config: ClippedConfig) -> LossOutput:
    """The clipped loss of every token (PPO, arXiv 1707.06347, eq. 7), bounded by delta if that is set.

    Returns:
        loss f32[B, T], and as diagnostics, 1 where it holds and 0 elsewhere: ``clip_ratio/low`` and
        ``clip_ratio/high``, tokens whose gradient the lower or upper clip removed; ``clip_ratio/region``,
        either.
    """
    ratio = token_ratio(inputs) if config.level == "token" else sequence_ratio(inputs)  # f32[B, T]
    lower, upper = 1 - config.clip_low, 1 + config.upper
    advantages = inputs.advantages
    bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
    loss = -torch.min(bounded * advantages, ratio.clamp(lower, upper) * advantages)
    low = (ratio < lower) & (advantages < 0)
    high = (ratio > upper) & (advantages > 0)
    diagnostics = {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/region": low | high}
    return LossOutput(loss, {name: where.to(loss.dtype) for name, where in diagnostics.items()})
