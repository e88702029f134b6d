"""Metrics of a generation batch: rewards and lengths, under the names that TRL users know, and episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from grpox.config.alarms import DIFFERS, SHARE
from grpox.contracts import FINISH_REASONS, Episode, Rollout, ScoredRollout
from grpox.policy.batch import TRUNCATED
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import ROUNDING

SUCCESS = "success"
"""Key of an environment's info: True if the episode reached its goal."""
SUCCESS_RATE = "episodes/success"
INFO = "info/"
"""Prefix of metrics that are means of other entries of the info."""
PART = "rewards/environment/"
"""Prefix of metrics that are means of parts of the environments' own rewards."""
_OF_REWARD = ("mean", "std", "abstained", "errors")
"""Names below `PART` that metrics of the reward function have."""


def reward_metrics(
    labels: Sequence[str], rewards: torch.Tensor, totals: torch.Tensor, num_generations: int
) -> dict[str, float]:
    """Return rewards/<f>/mean and std, reward, reward_std and frac_reward_zero_std, as TRL names them."""
    metrics = {}
    for label, column in zip(labels, rewards.T, strict=True):
        scored = column[~column.isnan()]
        if len(scored):
            metrics[f"rewards/{label}/mean"] = float(scored.mean())
            metrics[f"rewards/{label}/std"] = _std(scored)
        metrics[f"rewards/{label}/abstained"] = 1 - len(scored) / len(column)
    if len(scored := totals[~totals.isnan()]):
        metrics["reward"] = float(totals.nanmean())
        metrics["reward_std"] = _std(scored)
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
    weighing = weights.nonzero().flatten().tolist()[: len(labels)]
    if len(weighing) < 2:
        return signals
    groups = rewards[:, weighing].double().reshape(-1, num_generations, len(weighing))  # f64[G, M, K]
    deviations = (groups - groups.nanmean(dim=1, keepdim=True)) * weights[weighing].double()
    differs = torch.stack([~has_uniform_rewards(column) for column in groups.unbind(dim=2)])  # bool[K, G]
    # Rounding of equal rewards is no variance.
    squares = torch.where(differs.T.unsqueeze(1), deviations.nan_to_num().square(), 0.0).sum(dim=(0, 1))
    for k, square, varied in zip(
        weighing, squares.tolist(), differs.double().mean(dim=1).tolist(), strict=True
    ):
        signals[DIFFERS + labels[k]] = varied
        if squares.sum() > 0:
            signals[SHARE + labels[k]] = square / float(squares.sum())
    return signals


def error_metrics(rewards: Sequence[NamedReward], rows: Sequence[ScoredRollout]) -> dict[str, float]:
    """Return rewards/<f>/errors: completions among `rows` for which a function failed.

    Functions whose failure ends the run have no such metric.
    """
    failures = Counter([label for row in rows for label in row.failed])
    return {
        f"rewards/{reward.label}/errors": float(failures[reward.label])
        for reward in rewards
        if reward.on_error == "abstain"
    }


def _std(values: torch.Tensor) -> float:
    """Divide by n - 1, as TRL does; 0 for a single value."""
    return float(values.std()) if len(values) > 1 else 0.0


def has_uniform_rewards(groups: torch.Tensor) -> torch.Tensor:
    """Return True for groups that have equal scored rewards, or fewer than two: they teach nothing.

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
    """Return completions/mean_length, clipped_ratio and the rest, as TRL names them.

    Lengths are in tokens that the model wrote. A clipped completion ended because it had no room left.
    """
    lengths = model_lengths(rollouts)
    pairs = zip(lengths, rollouts, strict=True)
    ended = [length for length, rollout in pairs if rollout.finish_reason not in TRUNCATED]
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


def model_lengths(rollouts: Iterable[Rollout]) -> list[int]:
    """Count the tokens of each completion that the model wrote."""
    return [
        len(each.completion_ids) if each.model_mask is None else sum(map(bool, each.model_mask))
        for each in rollouts
    ]


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Measure turns, calls of tools and ends of episodes, and the facts that environments report.

    A batch of single-turn completions without an environment has none of these metrics.
    """
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    turns = [len(rollout.turns) for rollout in rollouts]
    if not episodes and not any(turns):
        return {}
    turns = [count or 1 for count in turns]
    ends = Counter(rollout.finish_reason for rollout in rollouts)
    observed = sum(len(rollout.completion_ids) for rollout in rollouts) - sum(model_lengths(rollouts))
    parts, facts = list[tuple[str, float]](), list[tuple[str, float]]()
    for episode in episodes:
        for name, value in (episode.rewards or {}).items():
            if name:
                parts.append((f"part_{name}" if name in _OF_REWARD else name, value * episode.weight))
        for name, value in episode.info.items():
            if name != SUCCESS and isinstance(value, bool | int | float):
                facts.append((name, float(value)))
    return {
        "turns/mean": mean(turns),
        "turns/min": float(min(turns)),
        "turns/max": float(max(turns)),
        "episodes/observation_tokens": observed / len(rollouts),
        "episodes/cut_answers": float(sum(episode.cut for episode in episodes)),
        "episodes/lost": float(sum(bool(episode.lost) for episode in episodes)),
        **{
            f"episodes/ended_by/{reason}": ends[reason] / len(rollouts)
            for reason in dict.fromkeys((*FINISH_REASONS, *sorted(ends)))
        },
        **_tool_metrics(episodes),
        **_finite_means(PART, parts),
        **_finite_means(INFO, facts),
        **_success_rate(episodes),
    }


def _success_rate(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the share of episodes whose info has a true ``success``; empty if no environment reports it.

    Environments that report it in no episode do not count. A lost or failed episode is no success, whatever
    its environment reported.
    """
    reporting = {episode.environment for episode in episodes if SUCCESS in episode.info}
    reached = [
        bool(episode.info.get(SUCCESS)) and not (episode.failure or episode.lost)
        for episode in episodes
        if episode.environment in reporting
    ]
    return {SUCCESS_RATE: mean(reached)} if reached else {}


def _tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Count the calls of each tool. Calls without the name of a tool are counted together."""
    metrics: Counter[str] = Counter()
    for result in (result for episode in episodes for result in episode.results):
        if result.failure == "unknown" or not result.call.name:
            metrics["tools/unknown_names"] += 1
            continue
        tool = f"tools/{result.call.name}"
        metrics[f"{tool}/calls"] += 1
        metrics[f"{tool}/failures"] += bool(result.failure)
        metrics[f"{tool}/timeouts"] += result.failure == "timeout"
    return {name: float(metrics[name]) for name in sorted(metrics)}


def _finite_means(prefix: str, numbers: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the episodes that have it with a finite number."""
    means = mean_metrics([{name: value} for name, value in numbers if math.isfinite(value)])
    return {f"{prefix}{name}": means[name] for name in sorted(means)}


def mean_metrics(all_metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the batches that have it: usually there is just one."""
    values: dict[str, list[float]] = {}
    for metrics in all_metrics:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(of_name) / len(of_name) for name, of_name in values.items()}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
