"""Dynamic sampling: groups that teach nothing are replaced by groups of prompts that are drawn anew.

A group whose advantages are all 0 makes the batch smaller than it looks. The scaler's `signal` names the
rewards that it reads: they are equal in such a group, or the scaler is called to find out. Each round samples
one new group for each such group; new groups with advantages replace them, in the order of drawing. Groups that
are left after the last round stay. Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from grpox.contracts import AdvantageScaler, ScoredRollout
from grpox.errors import RunFailed
from grpox.plugins.component import takes_inputs
from grpox.rollout.metrics import has_uniform_rewards

SIGNALS = ("sum", "functions", "all")
"""Values of a scaler's attribute `signal`."""


def signal_of(scaler: AdvantageScaler) -> str:
    """Return the rewards whose differences within a group the scaler turns into advantages: one of `SIGNALS`.

    Raises:
        RunFailed: it declares something else.
    """
    signal = getattr(scaler, "signal", "all" if takes_inputs(scaler) else "sum")
    if signal not in SIGNALS:
        what = f"advantage '{type(scaler).__name__}' has signal = {signal!r}; it is {', '.join(SIGNALS)}"
        raise RunFailed(what)
    return str(signal)


def are_flat(rewards: Tensor, weights: Tensor, size: int) -> list[bool]:
    """Flag each group of `size` rows in which every function with a weight other than 0 gives equal rewards.

    Args:
        rewards: f32[N, K], NaN where a function abstained.
        weights: f32[K].
    """
    count, functions = len(rewards) // size, int((weights != 0).sum())
    columns = rewards[:, weights != 0].reshape(count, size, functions).transpose(1, 2)
    uniform = has_uniform_rewards(columns.reshape(count * functions, size))
    flags: list[bool] = uniform.reshape(count, functions).all(dim=1).tolist()
    return flags


def refill(
    indices: list[int],
    rows: list[ScoredRollout],
    rounds: int,
    sample: Callable[[int, int], tuple[Sequence[int], Sequence[ScoredRollout]]],
    find_flat: Callable[[Sequence[int], Sequence[ScoredRollout]], Sequence[bool]],
) -> tuple[list[ScoredRollout], dict[str, float]]:
    """Replace flat groups in `indices` and `rows`, in at most `rounds` rounds; a collective.

    Args:
        indices: dataset index of each group's prompt.
        rows: completions of these groups, group by group, as many of each.
        sample: number of the round from 1, number of prompts -> indices and rows of as many groups, the same on
            every rank, and so every rank replaces the same.
        find_flat: flags the groups that have no advantage.

    Returns:
        the sampled completions that are not in the batch, and metrics.
    """
    count, size = len(indices), len(rows) // len(indices)
    flat = [group for group, is_flat in enumerate(find_flat(indices, rows)) if is_flat]
    done, drawn, wanted = 0, count, len(flat)
    dropped: list[ScoredRollout] = []
    while flat and done < rounds:
        done, drawn = done + 1, drawn + len(flat)
        new_indices, new = sample(done, len(flat))
        # Together with the batch, because a scaler may compare groups.
        others = [in_group(row, count + row.rollout.group_id) for row in new]
        flags = find_flat([*indices, *new_indices], [*rows, *others])[count:]
        for number, (index, is_flat) in enumerate(zip(new_indices, flags, strict=True)):
            of_group = new[number * size : (number + 1) * size]
            if is_flat:
                dropped += of_group
                continue
            group = flat.pop(0)
            own = slice(group * size, (group + 1) * size)
            dropped += rows[own]
            indices[group], rows[own] = index, [in_group(row, group) for row in of_group]
    return dropped, {
        "dynamic_sampling/rounds": float(done),
        "dynamic_sampling/replaced": (wanted - len(flat)) / count,
        "dynamic_sampling/prompts": float(drawn),
    }


def in_group(row: ScoredRollout, group_id: int) -> ScoredRollout:
    """Give a completion the number of a group."""
    return replace(row, rollout=replace(row.rollout, group_id=group_id))
