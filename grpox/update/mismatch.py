"""Mismatch of the generator's distribution mu and the trainer's pi_old: d = log pi_old - log mu per token.

Measured before any cap or mask: mean, least and largest exp(d), mean and largest |d|, k3 of the two, and the
effective sample size (sum R)^2 / (n * sum R^2) of the correction's own R; then what the correction did with it.
Healthy: mean ratio in [0.5, 2], effective sample size at least 0.3, the levels of verl's guide on rollout
correction (https://verl.readthedocs.io/en/latest/algo/rollout_corr.html); no log-probability missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from grpox.update.objective import Corrected, MicroBatchLoss
from grpox.update.token_metrics import places_of, select_values

PREFIX = "mismatch/"
OLD_PREFIX = "sampling/"
"""Earlier prefix of the same metrics, which are written under both names until the release after the first."""


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
"""Only of a generator that provides `Capability.LOGPROBS`."""

_EXPONENT = 300.0
"""Logarithms are limited to this either way: the square of exp(300), summed over a step, fits into float64."""
_ROUNDING = 1e-5
"""A weight less than R by no more than this share, some roundings of float32, was not truncated."""


def mismatch_of(results: Sequence[MicroBatchLoss], correction: Correction) -> dict[str, Tensor]:
    """Measure all tokens of a step on this rank at once: name -> [N].

    On a CPU that takes a fraction of the time that one micro-batch after the other takes.

    Args:
        results: every micro-batch, corrected.
        correction: its `raw`, (old, sampler, mask) -> R before any cap or mask, is exp(old - sampler) by
            default; its weights are R, or R truncated, unless `weighs_by_raw` is False.
    """
    raw = getattr(correction, "raw", None)
    names: tuple[str, ...] = ()
    parts = []
    for result in results:
        corrected, inputs = result.corrected, result.inputs
        assert corrected is not None
        assert inputs.sampler_logprobs is not None
        values = {name: getattr(corrected, name) for name in ("old", "sampler", "weights", "keep")}
        values["missing"] = inputs.sampler_logprobs.isnan()
        if raw is not None:
            values["raw"] = _raw(raw, corrected, inputs.token_mask)
        names = tuple(values)
        places = places_of(inputs.token_mask) if inputs.token_places is None else inputs.token_places
        parts.append(select_values(values, places))
    tokens = dict(zip(names, torch.cat(parts, dim=1).double(), strict=True))
    d = (tokens["old"] - tokens["sampler"]).nan_to_num(nan=0.0).clamp(-_EXPONENT, _EXPONENT)
    importance = ratio = d.exp()
    keep = tokens["keep"] > 0
    truncated = torch.zeros_like(keep)
    if getattr(correction, "weighs_by_raw", True):
        importance = tokens.get("raw", ratio)
        truncated = keep & (tokens["weights"] < importance * (1 - _ROUNDING))
    measured = {
        "ratio": ratio,
        "importance": importance,
        "importance_squared": importance.square(),
        "difference": d.abs(),
        "kl": torch.expm1(d) - d,  # k3 of KL(mu || pi_old), as the samples are mu's
        "truncated": truncated,
        "masked": ~keep,
        "missing_logprobs": tokens["missing"],
    }
    if raw is not None:
        measured["raw_ratio"] = tokens["raw"]
    return {PREFIX + name: value for name, value in measured.items()}


@torch.no_grad()
def _raw(raw: Callable[..., Tensor], corrected: Corrected, mask: Tensor) -> Tensor:
    """Call a correction's `raw`; returns numbers that can be squared and summed, f64[B, T]."""
    largest = math.exp(_EXPONENT)
    given = {"old": corrected.old.double(), "sampler": corrected.sampler.double(), "mask": mask}
    with unchanged("correction", raw, given):
        values: Tensor = call("correction", raw, *given.values())
    return values.double().nan_to_num(nan=1.0).clamp(1 / largest, largest)


def mismatch_metrics(reduced: dict[str, tuple[float, float, float]]) -> dict[str, float]:
    """Take the mismatch out of `reduced` (name -> mean, min, max) and name it for the log."""
    names = [name for name in reduced if name.startswith(PREFIX)]
    values = {name.removeprefix(PREFIX): reduced.pop(name) for name in names}
    if not values:
        return {}
    mean = {name: value[0] for name, value in values.items()}
    named = {
        "effective_sample_size": mean["importance"] ** 2 / mean["importance_squared"],
        "difference_mean": mean["difference"],
        "difference_max": values["difference"][2],
    }
    for name in ("ratio", "raw_ratio"):
        for statistic, value in zip(("mean", "min", "max"), values.get(name, ()), strict=False):
            named[f"{name}_{statistic}"] = value
    named |= {name: mean[name] for name in ("kl", "truncated", "masked", "missing_logprobs")}
    return {f"{prefix}{name}": value for prefix in (PREFIX, OLD_PREFIX) for name, value in named.items()}


def mismatch_warnings(metrics: Mapping[str, float], step: int, *, promised: bool) -> dict[str, str]:
    """Metric -> warning, for each that is outside its healthy range after `step`.

    Args:
        metrics: those of the step, as `mismatch_metrics` named them; none where the step had no tokens.
        promised: whether the generator provides `Capability.LOGPROBS`. One that does not leaves all out.
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
    """Return by how much log-probabilities of equal weights differ in the first step, and how much may.

    Args:
        update: metrics of a step whose samples and whose reference, if it has `kl`, come from the same weights.
        has_own_numerics: the generator computes in another way than the trainer.

    Raises:
        RunFailed: those of a dense model in float32 differ by more, though the generator computes alike.
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
