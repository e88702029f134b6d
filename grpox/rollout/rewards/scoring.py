"""Scores the completions of a batch by all reward functions of a run: rollouts -> scored rollouts.

A metric that a function logs keeps its label, so that a name which the trainer itself uses can be shown as
``<label>/<name>`` and never takes the trainer's place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from grpox.contracts import FLOAT32_MAX, Rollout, ScoredRollout, TrainerState
from grpox.errors import RunFailed
from grpox.rollout.rewards.lists import ListShape
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


@dataclass(frozen=True)
class RewardInputs:
    """N completions as reward functions are called with them."""

    rollouts: Sequence[Rollout]
    texts: Sequence[str]
    """All tokens of each completion as text, for people."""
    arguments: Mapping[str, list[Any]]
    """Argument -> N values: prompts, completions, their tokens and the data's other columns."""
    facts: Mapping[str, list[Any]] = field(default_factory=dict)
    """Argument -> N values, for functions that name it."""
    rated_tokens: Mapping[str, list[list[int]]] = field(default_factory=dict)
    """Label of a function that returns lists -> the tokens at which the numbers of each of N lists lie; empty
    unless the advantage reads lists."""


@dataclass(frozen=True)
class RewardNotes:
    """Metrics and warnings of reward functions, beside the scores."""

    logged: Logged = field(default_factory=dict)
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Key -> warning for the user; the warnings of one key are shown once."""


def reward_inputs(
    prompts: PromptSet,
    indices: Sequence[int],
    rollouts: Sequence[Rollout],
    rewards: Sequence[NamedReward],
    reads_lists: bool = False,
) -> RewardInputs:
    """Read the rows and decode the completions of `rollouts`; group g has the prompt at indices[g].

    Facts about episodes and prompts are collected if one of `rewards` asks for them.

    Args:
        reads_lists: True if the advantage reads the lists that functions return.
    """
    rows, ids = list[int](), list[list[int]]()
    for rollout in rollouts:
        rows.append(indices[rollout.group_id])
        ids.append(list(rollout.completion_ids))
    of_each, columns = prompts.rows(rows)
    texts = prompts.completion_texts(ids)
    completions: list[Any] = texts
    if prompts.conversational:
        completions = [
            [{"role": "assistant", "content": text}] if rollout.episode is None else [*rollout.episode.messages]
            for rollout, text in zip(rollouts, texts, strict=True)
        ]
    arguments = {**columns, "prompts": of_each, "completions": completions, "completion_ids": ids}
    wanted, shapes = set[str](), dict[str, ListShape]()
    for reward in rewards:
        wanted |= reward.signature.facts
        if reward.lists is not None:
            shapes[reward.label] = reward.lists
    facts = dict[str, list[Any]]()
    if wanted or shapes:
        facts = episode_arguments(rollouts, turn_texts(prompts, rollouts, texts))
    if "row_names" in wanted:
        facts["row_names"] = [prompts.place(row) for row in rows]
    if "prompt_ends" in wanted:
        facts["prompt_ends"] = prompts.prompt_texts([rollout.prompt_ids[-END_TOKENS:] for rollout in rollouts])
    inputs = RewardInputs(rollouts, texts, arguments, facts)
    if reads_lists and shapes:
        rated = {label: rated_tokens(shape, prompts, rollouts, texts) for label, shape in shapes.items()}
        return replace(inputs, rated_tokens=rated)
    return inputs


def rated_tokens(
    shape: ListShape, prompts: PromptSet, rollouts: Sequence[Rollout], texts: Sequence[str]
) -> list[list[int]]:
    """Find for each completion the tokens at which the numbers of its list lie."""

    def decode(token_ids: Sequence[int]) -> str:
        return prompts.completion_texts([token_ids])[0]

    return [
        shape.rated_tokens(rollout, text, decode, prompts.conversational)
        for rollout, text in zip(rollouts, texts, strict=True)
    ]


def turn_texts(prompts: PromptSet, rollouts: Sequence[Rollout], texts: Sequence[str]) -> list[list[str]]:
    """Return the text of each turn of the model; the text of a rollout without turns is one turn."""
    parts = [rollout.completion_ids[turn.start : turn.end] for rollout in rollouts for turn in rollout.turns]
    decoded = iter(prompts.completion_texts(parts) if parts else ())
    return [
        [next(decoded) for _ in rollout.turns] or [text] for rollout, text in zip(rollouts, texts, strict=True)
    ]


def episode_arguments(rollouts: Sequence[Rollout], turns: Sequence[Sequence[str]]) -> dict[str, list[Any]]:
    """Collect the facts of N rollouts; without an environment there are no calls, no rewards and no info.

    Args:
        turns: texts of the model's turns in each.
    """
    names = ("turns", "model_masks", "tool_calls", "environment_rewards", "environment_info")
    facts: dict[str, list[Any]] = {name: [] for name in names}
    for rollout, texts in zip(rollouts, turns, strict=True):
        mask, calls, info = rollout.model_mask, list[Any](), dict[str, Any]()
        rewards: dict[str, float] | None = None
        if (episode := rollout.episode) is not None:
            calls, info = [result.plain() for result in episode.results], dict(episode.info)
            if episode.rewards is not None:
                rewards = {part: value * episode.weight for part, value in episode.rewards.items()}
        written = [True] * len(rollout.completion_ids) if mask is None else list(mask)
        for name, value in zip(names, (list(texts), written, calls, rewards, info), strict=True):
            facts[name].append(value)
    return facts


def join_inputs(groups: Sequence[RewardInputs]) -> RewardInputs:
    """Join whole groups, one or more with the same columns, in order of group id."""
    in_order = sorted(groups, key=lambda group: group.rollouts[0].group_id)

    def joined(values: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
        return {name: list(chain.from_iterable(each[name] for each in values)) for name in values[0]}

    return RewardInputs(
        list(chain.from_iterable(group.rollouts for group in in_order)),
        list(chain.from_iterable(group.texts for group in in_order)),
        joined([group.arguments for group in in_order]),
        joined([group.facts for group in in_order]),
        joined([group.rated_tokens for group in in_order]),
    )


def score_rollouts(
    rewards: Sequence[NamedReward], inputs: RewardInputs, state: TrainerState
) -> tuple[list[ScoredRollout], RewardNotes]:
    """Score rollouts with every reward function, all at the same time; without rollouts call none.

    The result does not depend on which function ends first.

    Returns:
        the rollouts with their rewards, without prompt and advantage, and the functions' notes.

    Raises:
        RunFailed: a function with the policy ``fail`` raised (`__cause__` is its exception), took longer than
            its timeout, or returned anything but N finite numbers or None. No score is ever made up.
    """
    if not inputs.rollouts:
        return [], RewardNotes()
    arguments = {**inputs.arguments, "trainer_state": state}
    calls = call_together(rewards, arguments, len(inputs.rollouts), inputs.facts)
    warnings = _warnings(rewards, calls) | _failed_episodes(inputs.rollouts)
    values, failures = list[list[float | None]](), dict[str, Collection[int]]()
    metrics, columns = dict[str, dict[str, float]](), list[tuple[str, str, list[Any]]]()
    at_tokens = dict[str, list[list[float]]]()
    for reward, call in zip(rewards, calls, strict=True):
        values.append(call.values)
        if call.failed:
            failures[reward.label] = call.failed
        if reward.label in inputs.rated_tokens:
            at_tokens[reward.label] = _at_tokens(call, inputs.rated_tokens[reward.label], inputs.rollouts)
        if not call.failure:
            for name, logged in call.log.metrics.items():
                metrics.setdefault(name, {})[reward.label] = sum(logged) / len(logged)
            for name, column in call.log.columns.items():
                columns.append((reward.label, name, column))
    times = Counter([name for _, name, _ in columns])
    # A name that several functions log has the label of each before it.
    extra = {name if times[name] == 1 else f"{label}/{name}": column for label, name, column in columns}
    labels = [reward.label for reward in rewards]
    by_row = list(zip(*values, strict=True))
    totals: list[float] = weighted_sum(reward_matrix(by_row), weights_of(rewards)).tolist()
    rows = [
        ScoredRollout(
            rollout=rollout,
            prompt="",
            completion=inputs.texts[place],
            rewards=dict(zip(labels, by_row[place], strict=True)),
            reward=totals[place],
            advantage=math.nan,
            extra={name: column[place] for name, column in extra.items()} if extra else {},
            failed=tuple([label for label in failures if place in failures[label]]) if failures else (),
            token_rewards={label: at[place] for label, at in at_tokens.items()} if at_tokens else {},
        )
        for place, rollout in enumerate(inputs.rollouts)
    ]
    return rows, RewardNotes(metrics, warnings)


def _warnings(rewards: Sequence[NamedReward], calls: Sequence[RewardCall]) -> dict[str, str]:
    """Return a warning for each failure; raises RunFailed if a function with the policy ``fail`` failed."""
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


def _failed_episodes(rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Return a warning for the first failure of each environment."""
    warnings: dict[str, str] = {}
    for rollout in rollouts:
        episode = rollout.episode
        if episode is not None and (what := episode.lost or episode.failure):
            kind = "was lost" if episode.lost else "failed"
            warnings.setdefault(
                f"episode of {episode.environment} {kind}",
                f"an episode of environment '{episode.environment}' {kind}: {what}\n    it has no reward of "
                "its own; further ones are only counted (episodes/lost, episodes/ended_by/error)",
            )
    return warnings


def _at_tokens(
    call: RewardCall, rated: Sequence[Sequence[int]], rollouts: Sequence[Rollout]
) -> list[list[float]]:
    """Put the numbers of a function's lists at their tokens: N of f[T], NaN where the function abstained."""
    lists = [None] * len(rollouts) if call.failure or call.scores is None else call.scores.lists or ()
    all_rows = []
    for numbers, tokens, rollout in zip(lists, rated, rollouts, strict=True):
        row = [math.nan if numbers is None else 0.0] * len(rollout.completion_ids)
        for token, number in zip(tokens, numbers or (), strict=numbers is not None):
            row[token] += number  # one token may end several parts
        all_rows.append(row)
    return all_rows


def join_scores(
    parts: Sequence[tuple[list[ScoredRollout], RewardNotes]],
) -> tuple[list[ScoredRollout], RewardNotes]:
    """Join the rows of several calls, or ranks, in order of group and sample, whatever the order of the parts.

    A metric is the mean over the calls that logged it, weighed by their completions: ``sum n_c m_c / sum n_c``.
    """
    all_rows, logs, warnings = list[ScoredRollout](), list[tuple[Logged, int]](), dict[str, str]()
    for rows, notes in sorted(parts, key=lambda part: part[0][0].rollout.group_id):
        all_rows += rows
        logs.append((notes.logged, len(rows)))
        for key, text in notes.warnings.items():
            warnings.setdefault(key, text)
    all_rows.sort(key=attrgetter("rollout.group_id", "rollout.sample"))
    return all_rows, RewardNotes(weighed_mean_logged(logs), warnings)


def reward_matrix(scores: Sequence[Iterable[float | None]]) -> Tensor:
    """Return the scores of N completions by K functions as f32[N, K], NaN where a function abstained."""
    import torch

    numbers = [math.nan if score is None else score for of_row in scores for score in of_row]
    return torch.tensor(numbers, dtype=torch.float32).reshape(len(scores), -1)


def weights_of(rewards: Sequence[NamedReward]) -> Tensor:
    """Return the weights of reward functions: f32[K]."""
    import torch

    return torch.tensor([reward.weight for reward in rewards])


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each row, without re-weighting the rest where a function abstained.

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
    """Return the weighed mean of each metric over the logs that have it, label by label, in a fixed order."""
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
    """Add metrics that reward functions logged to the trainer's `own`; none replaces one of `own`.

    Returns:
        the metrics (the mean over functions, where several log one name), and a sentence for each one that is
        called ``<label>/<name>`` because the trainer itself uses the name.
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
