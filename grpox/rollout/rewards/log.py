"""What reward functions log: metrics averaged over calls, functions and ranks; a value per completion.

A metric keeps the label of the function it came from, so that a name which the trainer itself uses can be told
under ``<label>/<name>`` and never takes the trainer's place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpox.rollout.rewards.arguments import copied
from grpox.rollout.rewards.scores import BadScores, finite_number

Logged = Mapping[str, Mapping[str, float]]
"""Metric name -> label of the reward function that logged it -> value."""


@dataclass
class CallLog:
    """What one call of a reward function logs through `log_metric` and `log_extra`."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        """``log_metric(name, value)``; raises ValueError for what is no finite number."""
        number = finite_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}, {value!r}): a metric is a finite number")
        self.metrics.setdefault(str(name), []).append(number)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """``log_extra(column, values)``; several calls for one column append. Kept are copies of the values."""
        self.columns.setdefault(str(column), []).extend(copied(list(values)))

    def check(self, count: int) -> None:
        """Raises BadScores unless every column has a value for each of `count` completions."""
        for name, values in self.columns.items():
            if len(values) != count:
                raise BadScores(
                    f"logged {len(values)} values of log_extra column '{name}' for {count} completions"
                )


def logged_metrics(logs: Mapping[str, CallLog]) -> dict[str, dict[str, float]]:
    """The metrics of one batch, each the mean over its calls; `logs` is by label, in order of the rewards."""
    merged: dict[str, dict[str, float]] = {}
    for label, log in logs.items():
        for name, values in log.metrics.items():
            merged.setdefault(name, {})[label] = sum(values) / len(values)
    return merged


def extra_columns(logs: Mapping[str, CallLog]) -> dict[str, list[Any]]:
    """Column -> N values; a name that several functions log is told as ``<label>/<name>`` for each of them."""
    times = Counter(name for log in logs.values() for name in log.columns)
    return {
        name if times[name] == 1 else f"{label}/{name}": values
        for label, log in logs.items()
        for name, values in log.columns.items()
    }


def mean_logged(logs: Iterable[Logged]) -> dict[str, dict[str, float]]:
    """The mean of each metric over the ranks or batches that have it, label by label, in a fixed order."""
    return weighed_mean_logged((log, 1) for log in logs)


def weighed_mean_logged(logs: Iterable[tuple[Logged, int]]) -> dict[str, dict[str, float]]:
    """As `mean_logged`, of logs with their weights: those that lack a metric do not count in it."""
    found: dict[str, dict[str, list[tuple[float, int]]]] = {}
    for log, weight in logs:
        for name, by_label in log.items():
            for label, value in by_label.items():
                found.setdefault(name, {}).setdefault(label, []).append((value, weight))
    return {
        name: {label: _weighed_mean(values) for label, values in by_label.items()}
        for name, by_label in sorted(found.items())
    }


def _weighed_mean(values: Sequence[tuple[float, int]]) -> float:
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def with_logged(own: Mapping[str, float], logged: Logged) -> tuple[dict[str, float], list[str]]:
    """The trainer's `own` metrics with those that reward functions logged, none of which replaces one of `own`.

    Returns:
        The metrics (the mean over functions, where several log one name), and a sentence for each one that is
        told as ``<label>/<name>`` because the trainer itself uses the name.
    """
    free: dict[str, float] = {}
    renamed = []
    for name, by_label in logged.items():
        if name not in own:
            free[name] = sum(by_label.values()) / len(by_label)
            continue
        for label, value in by_label.items():
            free[f"{label}/{name}"] = value
            renamed.append(
                f"reward '{label}' logs '{name}', a metric of the trainer's: told as '{label}/{name}'"
            )
    return {**free, **own}, renamed
