"""Ends a run whose evaluations stop improving (`evaluation.early_stop`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from grpox.config import EarlyStopConfig
from grpox.config.sampling import PREFIX, bare_name
from grpox.errors import RunFailed, nearest


class EarlyStopState(BaseModel):
    """State of early stopping, saved in checkpoints."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    metric: str
    mode: Literal["max", "min"]
    best: float | None = None
    """Best value that counted as an improvement; None before the first evaluation."""
    best_step: int = 0
    """Number of optimizer steps of the weights with the best value."""
    without_gain: int = 0
    """Number of evaluations since the last improvement."""


class EarlyStop:
    """Follows a metric from evaluation to evaluation.

    An improvement is a value that is more than `min_delta` better than the last improvement; the first value
    counts as one. NaN and missing values are not improvements. Every rank has the same metrics, so all ranks
    stop together.
    """

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config = config
        self.state = EarlyStopState(metric=bare_name(config.metric), mode=config.mode)

    @property
    def stops(self) -> bool:
        """True after `patience` evaluations without an improvement."""
        return self.state.without_gain >= self.config.patience

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the evaluation after `step` optimizer steps.

        Raises:
            RunFailed: the first evaluation lacks the metric.
        """
        name, best = self.state.metric, self.state.best
        if name not in metrics and best is None and "completions/" not in name:
            near = nearest(bare_name(self.config.metric), metrics)
            guess = f"\n    did you mean  {near}" if near else ""
            raise RunFailed(
                f"evaluation.early_stop.metric: the evaluation has no metric {self.config.metric}, it has "
                f"{', '.join(sorted(metrics))}{guess}"
            )
        value, sign = metrics.get(name, math.nan), 1 if self.config.mode == "max" else -1
        if not math.isnan(value) and (best is None or sign * (value - best) > self.config.min_delta):
            changed: dict[str, Any] = {"best": value, "best_step": step, "without_gain": 0}
        else:
            changed = {"without_gain": self.state.without_gain + 1}
        self.state = self.state.model_copy(update=changed)

    def restore(self, state: EarlyStopState | None) -> None:
        """Restore the state from a checkpoint; the state of another metric is ignored."""
        if state is not None and (state.metric, state.mode) == (self.state.metric, self.state.mode):
            self.state = state

    def summary(self, step: int) -> dict[str, Any]:
        """Return the entry of the run's summary for a stop after `step`."""
        return {
            "step": step,
            "metric": PREFIX + self.state.metric,
            "best": self.state.best,
            "best_step": self.state.best_step,
            "evaluations_without_gain": self.state.without_gain,
        }


def describe_early_stop(stopped: Mapping[str, Any]) -> str:
    """Format the result of `EarlyStop.summary`, or the reason of an observer, as a sentence."""
    if "reason" in stopped:
        return f"after step {stopped.get('step')}: {stopped['reason']}"
    best = "never had a value"
    if isinstance(stopped.get("best"), int | float):
        when = f"after step {stopped['best_step']}" if stopped.get("best_step") else "before training"
        best = f"was best {when}, at {stopped['best']:.4g}"
    without = stopped.get("evaluations_without_gain")
    return (
        f"after step {stopped.get('step')}: {stopped.get('metric')} {best}; evaluations since then: {without}"
    )
