"""Rollouts -> what reward functions are given -> rows with rewards[K], for all completions of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpox.contracts import Rollout, Text, TrainerState
from grpox.rollout.rewards import NamedReward, score
from grpox.rollout.rewards.log import weighed_mean_logged
from grpox.rollout.rewards.stop import StopSign

if TYPE_CHECKING:
    from grpox.data.prompts import PromptSet


@dataclass(frozen=True)
class ScoredRow:
    """One completion with its reward from each function, as it travels between ranks."""

    rollout: Rollout
    rewards: tuple[float | None, ...]
    failed: tuple[bool, ...]
    """Which functions abstained because they failed."""
    extra: dict[str, Any]
    """What the functions told of it through `log_extra`."""
    completion: str = ""
    """Its text, as people read it."""


@dataclass(frozen=True)
class ScoredRows:
    """Scored rollouts of one rank, and what the functions told beside their scores."""

    rows: list[ScoredRow] = field(default_factory=list)
    logged: dict[str, dict[str, float]] = field(default_factory=dict)
    """From `log_metric`: name -> label of the function -> value."""
    warnings: dict[str, str] = field(default_factory=dict)
    """What the user should know, by a key under which it is told once."""


@dataclass(frozen=True)
class Unscored:
    """N rollouts as reward functions see them."""

    rollouts: Sequence[Rollout]
    prompts: Sequence[Text]
    completions: Sequence[Text]
    columns: dict[str, list[Any]]
    """The other dataset columns, N values each."""


def unscored(prompts: PromptSet, indices: Sequence[int], rollouts: Sequence[Rollout]) -> Unscored:
    """Read the rows and decode the completions of `rollouts`; group g is that of the prompt at indices[g]."""
    of_each, columns = prompts.rows([indices[rollout.group_id] for rollout in rollouts])
    completions = prompts.completions([rollout.completion_ids for rollout in rollouts])
    return Unscored(rollouts, of_each, completions, columns)


def as_one_call(groups: Sequence[Unscored]) -> Unscored:
    """Whole groups, one or more with the same columns, one after the other in order of group id."""
    in_order = sorted(groups, key=lambda group: group.rollouts[0].group_id)
    return Unscored(
        rollouts=[rollout for group in in_order for rollout in group.rollouts],
        prompts=[prompt for group in in_order for prompt in group.prompts],
        completions=[completion for group in in_order for completion in group.completions],
        columns={
            name: [value for group in in_order for value in group.columns[name]] for name in groups[0].columns
        },
    )


def score_rows(
    rewards: Sequence[NamedReward], given: Unscored, state: TrainerState, stop: StopSign | None = None
) -> ScoredRows:
    """Call every reward function once; without rollouts call none. What it raises: `rewards.score`."""
    table = score(
        rewards,
        prompts=given.prompts,
        completions=given.completions,
        completion_ids=[list(rollout.completion_ids) for rollout in given.rollouts],
        columns=given.columns,
        trainer_state=state,
        stop=stop,
    )
    rows = []
    for place, rollout in enumerate(given.rollouts):
        values = tuple(of_function[place] for of_function in table.values)
        failed = tuple(of_function[place] for of_function in table.failed)
        extra = {name: column[place] for name, column in table.extra_columns.items()}
        rows.append(ScoredRow(rollout, values, failed, extra, _as_read(given.completions[place])))
    return ScoredRows(rows, table.metrics, table.warnings)


def _as_read(completion: Text) -> str:
    """The text of a completion, which in a conversation is one message of the assistant."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def joined(parts: Sequence[ScoredRows]) -> ScoredRows:
    """The rows of several calls in order of group and sample, whatever the order of the calls.

    A metric is the mean over the calls that logged it, weighed by their completions: ``sum n_c m_c / sum n_c``.
    """
    in_order = sorted(parts, key=lambda part: part.rows[0].rollout.group_id)
    warnings: dict[str, str] = {}
    for part in in_order:
        warnings = {**part.warnings, **warnings}  # of the same key the first is told
    rows = [row for part in in_order for row in part.rows]
    rows.sort(key=lambda row: (row.rollout.group_id, row.rollout.sample))
    return ScoredRows(rows, weighed_mean_logged((part.logged, len(part.rows)) for part in in_order), warnings)
