"""Scores the completions of a batch by all reward functions of a run: rollouts -> rows with rewards[K].

A metric that a function logs keeps its label, so that a name which the trainer itself uses can be shown as
``<label>/<name>`` and never takes the trainer's place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpox.contracts import FLOAT32_MAX, Rollout, Text, TrainerState
from grpox.data.reward_signature import column_problem
from grpox.errors import Problem, RunFailed
from grpox.rollout.rewards.call import ByName
from grpox.rollout.rewards.named import NamedReward, RewardCall, call_together

if TYPE_CHECKING:
    from torch import Tensor

    from grpox.data.prompts import PromptSet

END_TOKENS = 32
"""Number of tokens in an entry of the reward argument `prompt_ends`."""
Logged = Mapping[str, Mapping[str, float]]
"""Metric name -> label of the reward function that logged it -> value."""

ROUNDING = 4 * 2.0**-23
"""Rewards whose spread is at most this share of the largest are equal: 0.1 + 0.2 and 0.3 + 0.
The eps of float32 is 2^-23."""


def _warnings(rewards: Sequence[NamedReward], calls: Sequence[RewardCall]) -> dict[str, str]:
    """Return warnings of what went wrong; raises RunFailed where a function with the policy ``fail`` failed."""
    fatal, warnings, causes = [], {}, []
    for reward, call in zip(rewards, calls, strict=True):
        if call.problem and reward.on_error == "fail":
            fatal.append(f"reward '{reward.label}' {call.problem}")
            causes += [call.error] if call.error is not None else []
        elif call.problem:
            warnings[f"failure of {reward.label}"] = (
                f"reward '{reward.label}' {call.problem}\n    it abstains for those completions; "
                f"further failures are only counted (rewards/{reward.label}/errors)"
            )
        if reward.in_main_thread:
            warnings[f"thread of {reward.label}"] = (
                f"reward '{reward.label}' sets a signal handler, which Python allows in the main thread only: "
                "it is called there, where its timeout cannot be kept"
            )
    if fatal:
        raise RunFailed("\n".join(fatal)) from next(iter(causes), None)
    return warnings


def column_problems(
    rewards: Sequence[NamedReward],
    columns: Sequence[str],
    key: str = "rewards",
    data: str = "the data",
) -> list[Problem]:
    """A problem for each column that a reward function cannot do without and the data lacks.

    Args:
        key: under which the run file lists them.
        data: what messages call the data.
    """
    return [
        column_problem(reward.label, name, columns, key, data)
        for reward in rewards
        for name in reward.missing_columns(columns)
    ]


@dataclass(frozen=True)
class ScoredRow:
    """One completion with its reward from each function, as it travels between ranks."""

    rollout: Rollout
    rewards: tuple[float | None, ...]
    failed: tuple[bool, ...]
    """True for functions that abstained because they failed."""
    extra: dict[str, Any]
    """Values that the functions told of it through `log_extra`."""
    completion: str = ""
    """Its text, as people read it."""
    lists: Mapping[str, list[float] | None] = field(default_factory=dict)
    """Label of a function that returned a list -> the list, None where it abstained."""
    token_rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The numbers of `lists` at their tokens, T of them, where the scaler reads them; see `rewards.lists`."""


@dataclass(frozen=True)
class ScoredRows:
    """Scored rollouts of one rank, and what the functions told beside their scores."""

    rows: list[ScoredRow] = field(default_factory=list)
    logged: dict[str, dict[str, float]] = field(default_factory=dict)
    """From `log_metric`: name -> label of the function -> value."""
    warnings: dict[str, str] = field(default_factory=dict)
    """Warnings for the user, by a key under which each is told once."""
    prompts_digest: str = ""
    """Hash of the tokens of all prompts of the request, as this rank reads them; empty on a single rank, and
    without rows."""


@dataclass(frozen=True)
class Unscored:
    """N rollouts as reward functions see them."""

    rollouts: Sequence[Rollout]
    prompts: Sequence[Text]
    completions: Sequence[Text]
    columns: dict[str, list[Any]]
    """The other dataset columns, N values each."""
    texts: Sequence[str]
    """Each completion as one text, for people."""
    by_name: ByName = field(default_factory=dict)
    """Facts about episodes, N values each."""


def unscored(
    prompts: PromptSet, indices: Sequence[int], rollouts: Sequence[Rollout], rewards: Sequence[NamedReward] = ()
) -> Unscored:
    """Read the rows and decode the completions of `rollouts`; group g is that of the prompt at indices[g].

    Facts about prompts are read where one of `rewards` asks for them.
    """
    of_each, columns = prompts.rows([indices[rollout.group_id] for rollout in rollouts])
    completions = prompts.completions_of(rollouts)
    texts = whole_texts(prompts, rollouts, completions)
    facts = episode_arguments(rollouts, turn_texts(prompts, rollouts, texts))
    asks = {name for reward in rewards for name in reward.signature.facts}
    if "row_names" in asks:
        facts["row_names"] = [prompts.place(indices[rollout.group_id]) for rollout in rollouts]
    if "prompt_ends" in asks:
        facts["prompt_ends"] = prompts.prompt_texts([rollout.prompt_ids[-END_TOKENS:] for rollout in rollouts])
    return Unscored(rollouts, of_each, completions, columns, texts, facts)


def episode_arguments(rollouts: Sequence[Rollout], turns: Sequence[Sequence[str]]) -> dict[str, list[Any]]:
    """Collect the facts of N rollouts; without an environment there are no calls, no rewards and no info.

    Args:
        turns: texts of the model's turns in each.
    """
    episodes = [rollout.episode for rollout in rollouts]
    return {
        "turns": [list(texts) for texts in turns],
        "model_masks": [
            [True] * len(rollout.completion_ids) if rollout.model_mask is None else list(rollout.model_mask)
            for rollout in rollouts
        ],
        "tool_calls": [
            [] if episode is None else [result.plain() for result in episode.results] for episode in episodes
        ],
        "environment_rewards": [
            None
            if episode is None or episode.rewards is None
            else {part: value * episode.weight for part, value in episode.rewards.items()}
            for episode in episodes
        ],
        "environment_info": [{} if episode is None else dict(episode.info) for episode in episodes],
    }


def whole_texts(prompts: PromptSet, rollouts: Sequence[Rollout], completions: Sequence[Text]) -> list[str]:
    """Return all tokens of each completion as text, for people.

    Args:
        completions: as `PromptSet.completions_of` decodes them; only conversations of several messages are
            decoded again.
    """
    pairs = list(zip(rollouts, completions, strict=True))
    several = [rollout.episode is not None and not isinstance(each, str) for rollout, each in pairs]
    parts = [rollout.completion_ids for rollout, needs in zip(rollouts, several, strict=True) if needs]
    decoded = iter(prompts.completion_texts(parts) if parts else ())
    return [
        next(decoded) if needs else each if isinstance(each, str) else str(each[0]["content"])
        for each, needs in zip(completions, several, strict=True)
    ]


def turn_texts(prompts: PromptSet, rollouts: Sequence[Rollout], texts: Sequence[str]) -> list[list[str]]:
    """Return the text of each turn of the model; the whole text is one where a rollout names none."""
    parts = [rollout.completion_ids[turn.start : turn.end] for rollout in rollouts for turn in rollout.turns]
    decoded = iter(prompts.completion_texts(parts) if parts else ())
    return [
        [next(decoded) for _ in rollout.turns] or [text] for rollout, text in zip(rollouts, texts, strict=True)
    ]


def as_one_call(groups: Sequence[Unscored]) -> Unscored:
    """Whole groups, one or more with the same columns, one after the other in order of group id."""
    in_order = sorted(groups, key=lambda group: group.rollouts[0].group_id)

    def together(lists: Iterable[Sequence[Any]]) -> list[Any]:
        return [value for values in lists for value in values]

    return Unscored(
        together(group.rollouts for group in in_order),
        together(group.prompts for group in in_order),
        together(group.completions for group in in_order),
        columns={name: together(group.columns[name] for group in in_order) for name in groups[0].columns},
        texts=together(group.texts for group in in_order),
        by_name={name: together(group.by_name[name] for group in in_order) for name in groups[0].by_name},
    )


def score_rows(rewards: Sequence[NamedReward], given: Unscored, state: TrainerState) -> ScoredRows:
    """Score rollouts with every reward function; without rollouts call none.

    Functions are called with keyword arguments only, and with those that their signature accepts, all at the
    same time. Which of them ends first changes nothing of what is returned.

    Raises:
        RunFailed: a function lacks a column; or one with the policy ``fail`` raised (`__cause__` is its
            exception), took longer than its timeout, or returned anything but N finite numbers or None. No
            score is ever made up.
    """
    if not given.rollouts:
        return ScoredRows()
    if problems := column_problems(rewards, list(given.columns)):
        raise RunFailed("\n".join(map(str, problems)))
    arguments = {
        **given.columns,
        "prompts": given.prompts,
        "completions": given.completions,
        "completion_ids": [list(rollout.completion_ids) for rollout in given.rollouts],
        "trainer_state": state,
    }
    calls = call_together(rewards, arguments, len(given.rollouts), given.by_name)
    warnings = _warnings(rewards, calls)
    labelled = list(zip([reward.label for reward in rewards], calls, strict=True))
    logs = [(label, call.log) for label, call in labelled if not call.failure]
    metrics: dict[str, dict[str, float]] = {}
    for label, log in logs:
        for name, logged in log.metrics.items():
            metrics.setdefault(name, {})[label] = sum(logged) / len(logged)
    times = Counter(name for _, log in logs for name in log.columns)
    extra = {  # a name that several functions log has the label of each before it
        name if times[name] == 1 else f"{label}/{name}": column
        for label, log in logs
        for name, column in log.columns.items()
    }
    nothing = [None] * len(given.rollouts)
    lists = {
        label: nothing if call.scores is None else call.scores.lists or nothing
        for reward, (label, call) in zip(rewards, labelled, strict=True)
        if reward.lists is not None
    }
    values, failed = [call.values for call in calls], [call.failed for call in calls]
    rows = [
        ScoredRow(
            rollout,
            tuple(of_function[place] for of_function in values),
            tuple(of_function[place] for of_function in failed),
            {name: column[place] for name, column in extra.items()},
            given.texts[place],
            {label: of_function[place] for label, of_function in lists.items()},
        )
        for place, rollout in enumerate(given.rollouts)
    ]
    return ScoredRows(rows, metrics, {**warnings, **_failed_episodes(given.rollouts)})


def _failed_episodes(rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Return a warning for the first failure of each environment."""
    warnings: dict[str, str] = {}
    for episode in (rollout.episode for rollout in rollouts if rollout.episode is not None):
        if what := episode.lost or episode.failure:
            kind = "was lost" if episode.lost else "failed"
            warnings.setdefault(
                f"episode of {episode.environment} {kind}",
                f"an episode of environment '{episode.environment}' {kind}: {what}\n    it has no reward of "
                "its own; further ones are only counted (episodes/lost, episodes/ended_by/error)",
            )
    return warnings


def joined(parts: Sequence[ScoredRows]) -> ScoredRows:
    """The rows of several calls, or ranks, in order of group and sample, whatever the order of the parts.

    A metric is the mean over the calls that logged it, weighed by their completions: ``sum n_c m_c / sum n_c``.
    """
    in_order = sorted(parts, key=lambda part: part.rows[0].rollout.group_id)
    warnings: dict[str, str] = {}
    for key, text in (item for part in in_order for item in part.warnings.items()):
        warnings.setdefault(key, text)
    rows = [row for part in in_order for row in part.rows]
    rows.sort(key=lambda row: (row.rollout.group_id, row.rollout.sample))
    return ScoredRows(rows, weighed_mean_logged((part.logged, len(part.rows)) for part in in_order), warnings)


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each row, without re-weighting the rest where a function abstained.

    Args:
        rewards: f32[N, K], finite, or NaN where function k abstained.
        weights: f32[K].

    Returns:
        f64[N], NaN where every function abstained.

    Raises:
        RunFailed: a sum is beyond the numbers of float32.
    """
    import torch

    scored = ~rewards.isnan()
    terms = torch.where(scored, rewards.double(), 0.0) * weights.double()
    # One function after the other: rows with equal rewards then have sums equal to the last bit.
    total = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for term in terms.unbind(dim=1):
        total = total + term
    # Terms that cancel but for rounding add up to 0: an advantage would divide that rounding by itself.
    total = torch.where(total.abs() > ROUNDING * terms.abs().sum(dim=1), total, 0.0)
    if bool((large := total.abs() > FLOAT32_MAX).any()):
        parts, whole = rewards[large][0].tolist(), total[large][0].item()
        raise RunFailed(f"the weighted sum of the rewards {parts} is {whole:g}, beyond the numbers of float32")
    return total.masked_fill(~scored.any(dim=1), torch.nan)


def weighed_mean_logged(logs: Iterable[tuple[Logged, int]]) -> dict[str, dict[str, float]]:
    """The weighed mean of each metric over the logs that have it, label by label, in a fixed order."""
    by_name: dict[str, dict[str, list[tuple[float, int]]]] = {}
    for log, weight in logs:
        for name, by_label in log.items():
            for label, value in by_label.items():
                by_name.setdefault(name, {}).setdefault(label, []).append((value, weight))
    return {
        name: {
            label: sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
            for label, values in by_label.items()
        }
        for name, by_label in sorted(by_name.items())
    }


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
