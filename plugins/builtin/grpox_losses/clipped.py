"""The clipped surrogate: `-min(w~ A, clip(w, 1-clip_low, 1+clip_high) A)`, `w~ = min(w, delta)` or w."""

from __future__ import annotations

import torch

from grpox.contracts import LossInputs, LossOutput
from grpox_losses.configs import ClippedConfig
from grpox_losses.ratio import sequence_ratio, token_ratio


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
