"""Which curves the report draws: the metrics that belong together, where the run has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpox.observing.report.data import RunRecord


@dataclass(frozen=True)
class Chart:
    """Curves that share an axis."""

    title: str
    note: str
    """What is measured, in a few words."""
    metrics: Mapping[str, str]
    """Legend -> name of the metric, in the steps or the evaluations."""
    stacked: bool = False
    """Parts of a whole, drawn on top of each other."""


_BEFORE_REWARDS = (
    Chart("Accuracy", "on held-out prompts", {"accuracy": "accuracy"}),
    Chart(
        "Reward",
        "weighted sum, mean over the batch",
        {"reward": "reward", "before groups are replaced": "dynamic_sampling/first_reward"},
    ),
)
_AFTER_REWARDS = (
    Chart(
        "Groups without signal",
        "share with equal rewards",
        {"share": "frac_reward_zero_std", "replaced": "dynamic_sampling/replaced"},
    ),
    Chart("Loss", "of the step", {"loss": "loss"}),
    Chart("KL to the reference", "estimated as train.kl says, nats per token", {"kl": "kl"}),
    Chart("KL to pi_old", "k3 estimate, nats per token", {"kl": "kl_old"}),
    Chart("Entropy", "nats per token", {"entropy": "entropy"}),
    Chart("Completions left out", "share that is off-policy", {"share": "off_policy_masked"}),
    Chart(
        "Completion length",
        "tokens",
        {
            "mean": "completions/mean_length",
            "shortest": "completions/min_length",
            "longest": "completions/max_length",
        },
    ),
    Chart("Completions cut off", "share at the longest length", {"share": "completions/clipped_ratio"}),
    Chart("Gradient norm", "before clipping", {"norm": "grad_norm"}),
    Chart("Learning rate", "of the step", {"rate": "learning_rate"}),
)
_AFTER_CLIPPING = (
    Chart(
        "Generator against trainer",
        "difference of log-probabilities",
        {"mean": "sampling/difference_mean", "largest": "sampling/difference_max"},
    ),
    Chart(
        "Speed",
        "tokens per second",
        {"generated": "tokens_per_second/generated", "trained": "tokens_per_second/trained"},
    ),
)


def charts_of(record: RunRecord) -> list[Chart]:
    """The charts of a run, without the metrics and the charts that it did not log."""
    names = record.metric_names()
    evaluated = list(dict.fromkeys(name for told in record.evaluations for name in told.values))
    of_rewards = list(dict.fromkeys([*names, *evaluated]))
    charts = [
        _BEFORE_REWARDS[0],
        _family("Pass@k", "chance that one of k completions is right", "pass_at_", evaluated),
        *_BEFORE_REWARDS[1:],
        *(
            Chart(f"Reward: {label}", "mean over the batch", {"mean": f"rewards/{label}/mean"})
            for label in _between("rewards/", of_rewards, "/mean")
        ),
        *_AFTER_REWARDS,
        _family("Tokens clipped", "share of tokens", "clip_ratio/", names, "_mean"),
        *_AFTER_CLIPPING,
        _family("Time of a step", "seconds on rank 0, by phase", "time/", names, stacked=True),
    ]
    recorded = {name for told in (*record.steps, *record.evaluations) for name in told.values}
    return [kept for chart in charts if (kept := _within(chart, recorded)).metrics]


def _between(prefix: str, names: Sequence[str], suffix: str) -> list[str]:
    return [
        name.removeprefix(prefix).removesuffix(suffix)
        for name in names
        if name.startswith(prefix) and name.endswith(suffix)
    ]


def _family(
    title: str, note: str, prefix: str, names: Sequence[str], suffix: str = "", stacked: bool = False
) -> Chart:
    metrics = {label: f"{prefix}{label}{suffix}" for label in _between(prefix, names, suffix)}
    return Chart(title, note, metrics, stacked)


def _within(chart: Chart, recorded: Iterable[str]) -> Chart:
    metrics = {label: name for label, name in chart.metrics.items() if name in recorded}
    return Chart(chart.title, chart.note, metrics, chart.stacked)
