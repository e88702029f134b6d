"""Dynamic sampling: groups that teach nothing are replaced by groups of prompts that are drawn anew.

A group whose advantages are all 0 leaves the batch smaller than it looks. The scaler says by its `signal` what
it reads: equal rewards tell such a group, or the scaler itself is asked. Each round samples as many new groups
as there are such; those of the new ones that tell completions apart take their places, in the order in which
they were drawn. What is left when the rounds are used up stays. Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from grpox.contracts import AdvantageScaler
from grpox.errors import RunFailed
from grpox.plugins.component import takes_inputs
from grpox.rollout.metrics import has_uniform_rewards
from grpox.rollout.rewards.scoring import ScoredRow, weighted_sum

SIGNALS = ("sum", "functions", "all")
"""Values of a scaler's attribute `signal`."""

PromptGroup = tuple[int, Sequence[ScoredRow]]
"""Dataset index of a prompt, and its completions in order."""


def signal_of(scaler: AdvantageScaler) -> str:
    """Return what differs within a group from which the scaler makes advantages, one of `SIGNALS`.

    Raises:
        RunFailed: it declares something else.
    """
    signal = getattr(scaler, "signal", "all" if takes_inputs(scaler) else "sum")
    if signal not in SIGNALS:
        what = f"advantage '{type(scaler).__name__}' has signal = {signal!r}; it is {', '.join(SIGNALS)}"
        raise RunFailed(what)
    return str(signal)


def is_flat(rewards: Tensor, weights: Tensor, signal: str) -> bool:
    """Return True for a group from which a scaler with this `signal`, sum or functions, makes no advantages.

    Args:
        rewards: f32[G, K], NaN where a function abstained.
        weights: f32[K].
    """
    if signal == "functions":
        return bool(has_uniform_rewards(rewards[:, weights != 0].T).all())
    return bool(has_uniform_rewards(weighted_sum(rewards, weights).float().unsqueeze(0)))


def refill(
    groups: list[PromptGroup],
    rounds: int,
    sample: Callable[[int, int], Sequence[PromptGroup]],
    find_flat: Callable[[Sequence[PromptGroup]], Sequence[bool]],
) -> tuple[list[ScoredRow], dict[str, float]]:
    """Replace flat groups in the list, in at most `rounds` rounds; a collective.

    Args:
        sample: number of the round from 1, number of prompts -> groups of as many prompts, the same on every
            rank, and so every rank replaces the same.
        find_flat: tells which of some groups have no advantage.

    Returns:
        the completions that were sampled and are no part of the batch, and metrics.
    """
    flat = [place for place, silent in enumerate(find_flat(groups)) if silent]
    done, drawn, wanted = 0, len(groups), len(flat)
    dropped: list[ScoredRow] = []
    while flat and done < rounds:
        done, drawn = done + 1, drawn + len(flat)
        new = sample(done, len(flat))
        # Among the others of the batch, as a scaler may compare groups.
        are_silent = find_flat([*groups, *new])[len(groups) :]
        for (index, rows), silent in zip(new, are_silent, strict=True):
            if silent:
                dropped += rows
                continue
            place = flat.pop(0)
            dropped += groups[place][1]
            groups[place] = index, in_group(place, rows)
    return dropped, {
        "dynamic_sampling/rounds": float(done),
        "dynamic_sampling/replaced": (wanted - len(flat)) / len(groups),
        "dynamic_sampling/prompts": float(drawn),
    }


def in_group(group_id: int, rows: Sequence[ScoredRow]) -> list[ScoredRow]:
    """Give completions the number of a group."""
    return [replace(row, rollout=replace(row.rollout, group_id=group_id)) for row in rows]
