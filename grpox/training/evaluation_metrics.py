"""Scored completions of held-out prompts -> the metrics of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from grpox.config import EvaluationConfig
from grpox.rollout.metrics import error_metrics, length_metrics, mean
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.weighted_sum import weighted_sum
from grpox.rollout.scored import ScoredRow
from grpox.training.pass_at_k import mean_pass_at_k


def evaluation_metrics(
    rows: Sequence[ScoredRow], rewards: Sequence[NamedReward], config: EvaluationConfig
) -> dict[str, float]:
    """Means and standard deviations over all completions, and pass@k over prompts.

    Args:
        rows: of every prompt its `num_generations` completions, one after the other.
        rewards: K functions, those that scored `rows`.
    """
    labels = [reward.label for reward in rewards]
    accuracy = labels.index(config.accuracy or labels[0])
    columns = [_given([row.rewards[place] for row in rows]) for place in range(len(labels))]
    metrics = {"accuracy": mean(columns[accuracy]) if columns[accuracy] else math.nan}
    metrics |= _pass_at_k(rows, accuracy, config)
    metrics |= _spread("reward", "reward_std", _given(_totals(rows, rewards)))
    for label, column in zip(labels, columns, strict=True):
        metrics[f"rewards/{label}/mean"] = math.nan
        metrics |= _spread(f"rewards/{label}/mean", f"rewards/{label}/std", column)
        metrics[f"rewards/{label}/abstained"] = 1 - len(column) / len(rows)
    metrics |= error_metrics(rewards, [row.failed for row in rows])
    return metrics | length_metrics([row.rollout for row in rows])


def totals_of(rows: Sequence[ScoredRow], rewards: Sequence[NamedReward]) -> torch.Tensor:
    """f64[N], the weighted sum of each row; NaN where every function abstained."""
    values = [[math.nan if value is None else value for value in row.rewards] for row in rows]
    weights = torch.tensor([reward.weight for reward in rewards])
    return weighted_sum(torch.tensor(values).reshape(len(rows), len(rewards)), weights)


def _totals(rows: Sequence[ScoredRow], rewards: Sequence[NamedReward]) -> list[float | None]:
    return [None if math.isnan(total) else total for total in totals_of(rows, rewards).tolist()]


def _given(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(mean_name: str, std_name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation, the latter over n - 1 as in training; nothing where there are no values."""
    if not values:
        return {}
    std = float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0
    return {mean_name: mean(values), std_name: std}


def _pass_at_k(rows: Sequence[ScoredRow], place: int, config: EvaluationConfig) -> dict[str, float]:
    prompts = list(_counted(rows, place, config))
    found = {f"pass_at_{k}": mean_pass_at_k(prompts, k) for k in config.pass_at_k}
    return {name: math.nan if value is None else value for name, value in found.items()}


def _counted(rows: Sequence[ScoredRow], place: int, config: EvaluationConfig) -> Iterator[tuple[int, int]]:
    """(completions that have a score, those that are right) of each prompt."""
    size = config.num_generations
    for start in range(0, len(rows), size):
        scores = _given([row.rewards[place] for row in rows[start : start + size]])
        yield len(scores), sum(score >= config.right_at for score in scores)
