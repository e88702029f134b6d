"""Mismatch of the generator's distribution mu and the trainer's pi_old: d = log pi_old - log mu per token.

Measures before any cap or mask: mean, least and largest exp(d), mean and largest |d|, k3, and the effective
sample size (sum R)^2 / (n * sum R^2) of the correction's own R. Others count the tokens that it cut or dropped.
Healthy: mean ratio in [0.5, 2], effective sample size at least 0.3, the levels of verl's guide on rollout
correction (https://verl.readthedocs.io/en/latest/algo/rollout_corr.html); no log-probability missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpox.config import RunConfig
from grpox.config.alarms import ALLOWED, FIRST
from grpox.contracts import Correction
from grpox.errors import RunFailed
from grpox.policy.precision import float32_precision
from grpox.runfile.checks import changed_distribution
from grpox.runfile.model_options import OF_EXPERTS
from grpox.runtime.foreign_code import call, unchanged
from grpox.update.objective import MicroBatchLoss

PREFIX = "mismatch/"
OLD_PREFIX = "sampling/"
"""Earlier prefix of the same metrics. Both names are written until the release after the first."""


FIRST_STEP, ROUNDINGS, TF32 = 1e-4, 8, 2.0**-10
"""Difference that the first step may have, in nats and in roundings; the rounding of TensorFloat-32."""


@dataclass(frozen=True)
class Alarm:
    """The range in which a metric is healthy, and what to do outside of it."""

    metric: str
    low: float
    high: float
    healthy: str
    advice: str


ALARMS = (
    Alarm(
        "mismatch/ratio_mean",
        0.5,
        2.0,
        "0.5 to 2",
        "The generator samples from another distribution than the policy's, which no correction mends: compare "
        "what it computes in with model.dtype, and look for settings of 'sampling' that forbid tokens",
    ),
    Alarm(
        "mismatch/effective_sample_size",
        0.3,
        math.inf,
        "at least 0.3",
        "Few tokens carry most of the weight: compare what the generator computes in with model.dtype; with "
        "train.max_staleness, lower train.learning_rate or set it to 0; "
        "'correction: token-mask' drops the tokens that are furthest off",
    ),
)
MISSING = Alarm(
    "mismatch/missing_logprobs",
    0.0,
    0.0,
    "0",
    "The generator says that it provides log-probabilities, and left some out or gave NaN: these tokens are "
    "trained uncorrected, and NaN means that its weights or its precision are wrong",
)
"""Applies only to a generator that provides `Capability.LOGPROBS`."""

_EXPONENT = 300.0
"""Logarithms are limited to this either way: the square of exp(300), summed over a step, fits into float64."""
_ROUNDING = 1e-5
"""A weight that is below R by at most this share, a few roundings of float32, was not truncated."""


def mismatch_inputs(result: MicroBatchLoss, sampler: Tensor, correction: Correction) -> list[Tensor]:
    """List the inputs of the mismatch of a micro-batch's tokens, [B, T] each.

    Args:
        sampler: f32[B, T] as the generator reported it, NaN where unknown.
        correction: its optional `raw`, (old, sampler, mask) -> R before any cap or mask, adds an input, as
            numbers that can be squared and summed.
    """
    inputs, raw = result.inputs, getattr(correction, "raw", None)
    assert result.correction is not None
    assert inputs.sampler_logprobs is not None
    values = [inputs.old_logprobs, inputs.sampler_logprobs, *result.correction, sampler.isnan()]
    if raw is not None:
        largest = math.exp(_EXPONENT)
        tensors = (inputs.old_logprobs.double(), inputs.sampler_logprobs.double(), inputs.token_mask)
        with unchanged("correction", raw, dict(zip(("old", "sampler", "mask"), tensors, strict=True))):
            weights: Tensor = call("correction", raw, *tensors)
        values.append(weights.double().nan_to_num(nan=1.0).clamp(1 / largest, largest))
    return values


def mismatch_of(tokens: Tensor, correction: Correction) -> dict[str, Tensor]:
    """Measure all tokens of a step on this rank at once: name -> f64[N].

    On a CPU this takes a fraction of the time that separate micro-batches take.

    Args:
        tokens: f64[5 or 6, N] of `mismatch_inputs`.
        correction: without `raw`, R before any cap or mask is exp(old - sampler); its weights are that R, or
            that R truncated, unless `weighs_by_raw` is False.
    """
    old, sampler, weights, keep, missing, *raw = tokens
    d = (old - sampler).nan_to_num(nan=0.0).clamp(-_EXPONENT, _EXPONENT)
    importance = ratio = d.exp()
    truncated = torch.zeros_like(d)
    if getattr(correction, "weighs_by_raw", True):
        importance = raw[0] if raw else ratio
        truncated = ((keep > 0) & (weights < importance * (1 - _ROUNDING))).double()
    measured = {
        "ratio": ratio,
        "importance": importance,
        "importance_squared": importance.square(),
        "difference": d.abs(),
        "kl": torch.expm1(d) - d,  # k3 of KL(mu || pi_old), as the samples are mu's
        "truncated": truncated,
        "masked": 1 - keep,
        "missing_logprobs": missing,
    }
    if raw:
        measured["raw_ratio"] = raw[0]
    return {PREFIX + name: value for name, value in measured.items()}


def mismatch_metrics(reduced: dict[str, tuple[float, float, float]]) -> dict[str, float]:
    """Take the mismatch out of `reduced` (name -> mean, min, max) and name it for the log."""
    metrics: dict[str, float] = {}
    for name in [each for each in reduced if each.startswith(PREFIX)]:
        mean, low, high = reduced.pop(name)
        if name.endswith("ratio"):
            metrics |= {f"{name}_mean": mean, f"{name}_min": low, f"{name}_max": high}
        elif name.endswith("difference"):
            metrics |= {f"{name}_mean": mean, f"{name}_max": high}
        else:
            metrics[name] = mean
    if metrics:
        importance, squared = metrics.pop(f"{PREFIX}importance"), metrics.pop(f"{PREFIX}importance_squared")
        metrics[f"{PREFIX}effective_sample_size"] = importance**2 / squared
    return metrics | {name.replace(PREFIX, OLD_PREFIX): value for name, value in metrics.items()}


def mismatch_warnings(metrics: Mapping[str, float], step: int, *, promised: bool) -> dict[str, str]:
    """Return metric -> warning, for each metric that is outside its healthy range after `step`.

    Args:
        metrics: metrics of the step as `mismatch_metrics` names them; empty if the step had no tokens.
        promised: True if the generator provides `Capability.LOGPROBS`; other generators may report none.
    """
    watched = (*ALARMS, MISSING) if promised else ALARMS
    return {
        alarm.metric: f"{alarm.metric} is {value:.3g} at step {step}; healthy is {alarm.healthy}. "
        f"{alarm.advice} (docs/corrections.md)"
        for alarm in watched
        if (value := metrics.get(alarm.metric)) is not None and not alarm.low <= value <= alarm.high
    }


def first_step_measures(
    update: Mapping[str, float], config: RunConfig, model: Any, has_own_numerics: bool
) -> dict[str, float]:
    """Return how much log-probabilities of equal weights differ in the first step, and how much they may.

    Args:
        update: metrics of a step whose samples and whose reference, if it has `kl`, come from the same weights.
        has_own_numerics: the generator computes in another way than the trainer.

    Raises:
        RunFailed: they differ by more in a dense float32 model whose generator computes as the trainer does.
    """
    has_changed = bool(changed_distribution(config.sampling))
    difference = 0.0 if has_changed else update.get("mismatch/difference_mean", 0.0)
    kl, is_float32 = update.get("kl", 0.0), model.dtype == torch.float32
    is_rounded = is_float32 and model.device.type == "cuda" and float32_precision() != "highest"
    allowed = max(FIRST_STEP, ROUNDINGS * (TF32 if is_rounded else torch.finfo(model.dtype).eps))
    is_dense = not any(map(OF_EXPERTS.search, model.config.get_text_config().to_dict()))
    if is_float32 and is_dense and not has_own_numerics and max(difference, kl) > allowed:
        raise RunFailed(
            "sampling, training or the reference compute different log-probabilities from equal weights: in "
            f"the first step mismatch/difference_mean is {difference:.3g} and kl {kl:.3g}, but rounding makes "
            f"at most {allowed:.2g} (docs/corrections.md)"
        )
    return {FIRST: max(difference, kl), ALLOWED: allowed}
