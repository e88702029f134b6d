"""How far the generator's distribution mu is from the trainer's pi_old: d = log pi_old - log mu per token.

Measured before any cap: mean, least and largest exp(d), effective sample size (sum R)^2 / (n * sum R^2), mean
and largest |d|, and k3 of the two. Healthy: mean ratio in [0.5, 2], effective sample size at least 0.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpox.metrics import TokenMetrics
from grpox.rollout import RolloutBatch

_PREFIX = "sampling/"


def add_mismatch(metrics: TokenMetrics, difference: Tensor, batch: RolloutBatch) -> None:
    """Add d f32[B, T] of one micro-batch; positions outside the token mask are ignored."""
    mask = batch.token_mask
    d = torch.where(mask, difference, torch.zeros_like(difference)).double()
    ratio = d.exp()
    values = {
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "difference": d.abs(),
        "kl": torch.expm1(d) - d,  # k3 of KL(mu || pi_old), as the samples are mu's
        "missing_logprobs": batch.sampler_logprobs.isnan().double(),
    }
    for name, value in values.items():
        metrics.add(_PREFIX + name, value, mask)


def mismatch_metrics(reduced: dict[str, tuple[float, float, float]]) -> dict[str, float]:
    """Take the mismatch out of `reduced` (name -> mean, min, max) and name it for the log."""
    names = [name for name in reduced if name.startswith(_PREFIX)]
    values = {name.removeprefix(_PREFIX): reduced.pop(name) for name in names}
    if not values:
        return {}
    mean, low, high = values["ratio"]
    return {
        "sampling/ratio_mean": mean,
        "sampling/ratio_min": low,
        "sampling/ratio_max": high,
        "sampling/effective_sample_size": mean**2 / values["ratio_squared"][0],
        "sampling/difference_mean": values["difference"][0],
        "sampling/difference_max": values["difference"][2],
        "sampling/kl": values["kl"][0],
        "sampling/missing_logprobs": values["missing_logprobs"][0],
    }
