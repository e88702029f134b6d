"""Metrics of episodes: turns, calls of tools, ends, and what environments report of them.

A batch whose completions all are one turn without environment has none of these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from grpox.contracts import FINISH_REASONS, Episode, Rollout
from grpox.rollout.metrics import mean, model_length

SUCCESS = "success"
"""Key of an environment's info: True if the episode reached its goal."""
INFO = "info/"
"""Prefix of metrics that are means of other entries of the info."""
PART = "rewards/environment/"
"""Prefix of metrics that are means of parts of the environments' own rewards."""
_OF_REWARD = ("mean", "std", "abstained", "errors")
"""Names below `PART` that metrics of the reward function have."""


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Measure the episodes among `rollouts`; `success` is left to `success_rate`."""
    if not any(rollout.turns or rollout.episode is not None for rollout in rollouts):
        return {}
    turns = [len(rollout.turns) or 1 for rollout in rollouts]
    ends = Counter(rollout.finish_reason for rollout in rollouts)
    observed = [len(rollout.completion_ids) - model_length(rollout) for rollout in rollouts]
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    return {
        "turns/mean": mean(turns),
        "turns/min": float(min(turns)),
        "turns/max": float(max(turns)),
        "episodes/observation_tokens": mean(observed),
        "episodes/cut_answers": float(sum(episode.cut for episode in episodes)),
        "episodes/lost": float(sum(bool(episode.lost) for episode in episodes)),
        **{
            f"episodes/ended_by/{reason}": ends[reason] / len(rollouts)
            for reason in dict.fromkeys((*FINISH_REASONS, *sorted(ends)))
        },
        **_tool_metrics(episodes),
        **_means(
            PART,
            (
                (f"part_{name}" if name in _OF_REWARD else name, value * episode.weight)
                for episode in episodes
                for name, value in (episode.rewards or {}).items()
                if name
            ),
        ),
        **_means(
            INFO,
            (
                (name, float(value))
                for episode in episodes
                for name, value in episode.info.items()
                if name != SUCCESS and isinstance(value, bool | int | float)
            ),
        ),
    }


def success_rate(rollouts: Sequence[Rollout]) -> float | None:
    """Return the share of episodes whose info has a true ``success``; None if no environment reports it.

    Episodes of environments that report it in no other episode do not count. A lost or failed episode is no
    success, whatever its environment still said.
    """
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    reporting = {episode.environment for episode in episodes if SUCCESS in episode.info}
    reached = [
        bool(episode.info.get(SUCCESS)) and not (episode.failure or episode.lost)
        for episode in episodes
        if episode.environment in reporting
    ]
    return mean(reached) if reached else None


def _tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Count the calls of each tool. Calls without the name of a tool are counted together."""
    metrics: Counter[str] = Counter()
    for result in (result for episode in episodes for result in episode.results):
        if result.failure == "unknown" or not result.call.name:
            metrics["tools/unknown_names"] += 1
            continue
        for name, counts in (
            ("calls", True),
            ("failures", bool(result.failure)),
            ("timeouts", result.failure == "timeout"),
        ):
            metrics[f"tools/{result.call.name}/{name}"] += counts
    return {name: float(metrics[name]) for name in sorted(metrics)}


def _means(prefix: str, numbers: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the episodes that have it with a finite number."""
    values: dict[str, list[float]] = {}
    for name, value in numbers:
        if math.isfinite(value):
            values.setdefault(name, []).append(value)
    return {f"{prefix}{name}": mean(values[name]) for name in sorted(values)}
