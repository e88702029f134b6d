"""What an evaluation samples and scores with: its own settings where the run file gives any, else the run's."""

from __future__ import annotations

from collections.abc import Mapping

from grpox.config import EvaluationConfig, RewardRef, RunConfig, SamplingConfig, labels_of

PREFIX = "evaluation/"
"""Before the name of an evaluation's metric wherever it stands beside those of steps."""


def sampling_of(evaluation: EvaluationConfig, sampling: SamplingConfig) -> SamplingConfig:
    """The run's `sampling` as evaluations have it. Nothing is checked: a temperature of 0 is greedy here."""
    own = {name: value for name, value in evaluation.sampling if value is not None}
    return sampling.model_copy(update={"temperature": evaluation.temperature, **own})


def rewards_of(config: RunConfig) -> list[RewardRef]:
    """The reward functions of the evaluation."""
    own = config.evaluation.rewards if config.evaluation is not None else None
    return config.rewards if own is None else own


def labels_of_evaluation(config: RunConfig) -> list[str]:
    """What metrics call each of them."""
    return labels_of(rewards_of(config))


def bare_name(metric: str) -> str:
    """An evaluation's metric as the evaluation itself calls it."""
    return metric.removeprefix(PREFIX)


def evaluation_in(metrics: Mapping[str, float]) -> dict[str, float]:
    """The evaluation's metrics among those of a step, as the evaluation itself calls them."""
    return {bare_name(name): value for name, value in metrics.items() if name.startswith(PREFIX)}
