"""Metrics of a generation batch under the names that TRL users know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from grpox.config.alarms import DIFFERS, SHARE
from grpox.contracts import Rollout
from grpox.policy.batch import TRUNCATED
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import ROUNDING


def reward_metrics(
    labels: Sequence[str], rewards: torch.Tensor, totals: torch.Tensor, num_generations: int
) -> dict[str, float]:
    """TRL's names: rewards/<f>/mean and std, reward, reward_std, frac_reward_zero_std."""
    metrics = {}
    for label, column in zip(labels, rewards.T, strict=True):
        scored = column[~column.isnan()]
        if len(scored):
            metrics[f"rewards/{label}/mean"] = float(scored.mean())
            metrics[f"rewards/{label}/std"] = _std(scored)
        metrics[f"rewards/{label}/abstained"] = 1 - len(scored) / len(column)
    if bool((~totals.isnan()).any()):
        metrics["reward"] = float(totals.nanmean())
        metrics["reward_std"] = _std(totals[~totals.isnan()])
    metrics["frac_reward_zero_std"] = float(
        has_uniform_rewards(totals.reshape(-1, num_generations)).double().mean()
    )
    return metrics


def reward_signals(
    labels: Sequence[str],
    rewards: torch.Tensor,
    totals: torch.Tensor,
    weights: torch.Tensor,
    num_generations: int,
) -> dict[str, float]:
    """Measure how rewards differ within groups, for the alarms.

    `alarms/highest` and `alarms/lowest` are extremes of the weighted sums. With several functions of non-zero
    weight, `alarms/share/<f>` is the pooled variance of w_f r_f within groups over the sum of the variances of
    all functions, and `alarms/differs/<f>` the share of groups in which r_f differs. A share is left out if no
    function differs.

    Args:
        rewards: f32[N, K], NaN where a function abstained.
        totals: f32[N].
        weights: f32[K].
    """
    signals = {}
    scored = totals[~totals.isnan()]
    if len(scored):
        signals = {"alarms/highest": float(scored.max()), "alarms/lowest": float(scored.min())}
    weighing = [place for place, weight in enumerate(weights.tolist()) if weight][: len(labels)]
    if len(weighing) < 2:
        return signals
    groups = rewards[:, weighing].double().reshape(-1, num_generations, len(weighing))  # f64[G, M, K]
    deviations = (groups - groups.nanmean(dim=1, keepdim=True)) * weights[weighing].double()
    differs = torch.stack([~has_uniform_rewards(column) for column in groups.unbind(dim=2)])  # bool[K, G]
    # Rounding of equal rewards is no variance.
    squares = torch.where(differs.T.unsqueeze(1), deviations.nan_to_num().square(), 0.0).sum(dim=(0, 1))
    for place, square, varied in zip(
        weighing, squares.tolist(), differs.double().mean(dim=1).tolist(), strict=True
    ):
        signals[DIFFERS + labels[place]] = varied
        if squares.sum() > 0:
            signals[SHARE + labels[place]] = square / float(squares.sum())
    return signals


def error_metrics(rewards: Sequence[NamedReward], failed: Sequence[Sequence[bool]]) -> dict[str, float]:
    """rewards/<f>/errors: completions, among those of `failed` [N][K], for which a function failed.

    Functions whose failure ends the run have no such metric.
    """
    return {
        f"rewards/{reward.label}/errors": float(sum(row[place] for row in failed))
        for place, reward in enumerate(rewards)
        if reward.on_error == "abstain"
    }


def _std(values: torch.Tensor) -> float:
    """Over n - 1, as TRL has it; 0 for a single value."""
    return float(values.std()) if len(values) > 1 else 0.0


def has_uniform_rewards(groups: torch.Tensor) -> torch.Tensor:
    """Tell which groups have equal scored rewards, or fewer than two: they teach nothing.

    Args:
        groups: f32[G, M], NaN where nothing was scored.

    Returns:
        bool[G]
    """
    unscored = groups.isnan()
    low = groups.masked_fill(unscored, torch.inf).amin(dim=1)
    high = groups.masked_fill(unscored, -torch.inf).amax(dim=1)
    return ~(high - low > ROUNDING * torch.maximum(low.abs(), high.abs()))  # no score: -inf > inf is false


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """TRL's names: completions/mean_length, clipped_ratio and the rest, in tokens that the model wrote.

    Clipped are completions that ended for want of room.
    """
    lengths = [model_length(rollout) for rollout in rollouts]
    ended = [model_length(rollout) for rollout in rollouts if rollout.finish_reason not in TRUNCATED]
    metrics = {
        "completions/mean_length": mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
    }
    if ended:
        metrics["completions/mean_terminated_length"] = mean(ended)
        metrics["completions/min_terminated_length"] = float(min(ended))
        metrics["completions/max_terminated_length"] = float(max(ended))
    return metrics


def model_length(rollout: Rollout) -> int:
    """Count the tokens that the model wrote."""
    mask = rollout.model_mask
    return len(rollout.completion_ids) if mask is None else sum(map(bool, mask))


def mean_metrics(all_metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the batches that have it: usually there is just one."""
    names = dict.fromkeys(name for metrics in all_metrics for name in metrics)
    return {name: mean([metrics[name] for metrics in all_metrics if name in metrics]) for name in names}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
