"""Checks of rollouts as a generator returns them: all that were asked for, without a contradiction."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from grpox.contracts import CallFailure, Episode, Prompt, Rollout
from grpox.errors import RunFailed, shorten
from grpox.plugins.component_state import odd_part


def check_rollouts(rollouts: Sequence[Rollout], requests: Sequence[Prompt], versions: range) -> None:
    """Refuse rollouts that are not the ones asked for: nothing missing, doubled or outdated is trained on.

    Args:
        rollouts: all of them, in order of group and sample.
        requests: in order of group.
        versions: optimizer steps of the weights that may have sampled them; the last are the policy's.

    Raises:
        RunFailed: a sample is missing or doubled, or was sampled by other weights or from another prompt.
    """
    expected = [(prompt.group_id, sample) for prompt in requests for sample in range(prompt.num_samples)]
    came = [(rollout.group_id, rollout.sample) for rollout in rollouts]
    if came != expected:
        missing, more = Counter(expected) - Counter(came), Counter(came) - Counter(expected)
        differences = [
            f"{different.total()} {kind}, such as group_id {min(different)[0]} sample {min(different)[1]}"
            for kind, different in (("missing", missing), ("not asked for, or twice", more))
            if different
        ]
        raise RunFailed(
            f"the generator returned {len(rollouts)} rollouts that are not the {len(expected)} asked for: "
            + "; ".join(differences)
        )
    prompts = {prompt.group_id: prompt.token_ids for prompt in requests}
    for rollout in rollouts:
        if rollout.policy_version not in versions:
            begun = f" and sampling was begun at version {versions[0]}" if len(versions) > 1 else ""
            raise RunFailed(
                f"the generator returned a rollout of policy version {rollout.policy_version}, "
                f"the policy is at version {versions[-1]}{begun}"
            )
        # An environment may have added to the prompt of an episode.
        if rollout.episode is None and tuple(rollout.prompt_ids) != prompts[rollout.group_id]:
            raise RunFailed(
                f"the generator returned a rollout (group {rollout.group_id}, sample {rollout.sample}) "
                "whose prompt_ids are not the token_ids of its prompt"
            )


def rollout_problem(rollout: Rollout, vocabulary: int | None = None) -> str:
    """Describe the first field of a rollout that does not fit the others; empty if all do.

    Args:
        vocabulary: number of tokens that the model knows; None: accept any token.
    """
    ids: Any = rollout.completion_ids  # a generator may give anything
    logprobs: Any = rollout.sampler_logprobs
    if not hasattr(ids, "__len__"):
        return f"completion_ids is a {type(ids).__name__} and no tuple of token ids"
    if not len(ids):
        return "completion_ids is empty: the tokens that the model wrote are needed, an ending EOS included"
    if not _is_reason(rollout.finish_reason):
        return f"finish_reason is {rollout.finish_reason!r} and no text"
    known = math.inf if vocabulary is None else vocabulary
    # By type, in one pass without Python code: a batch has a million tokens.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= known:
        for token in ids:
            if not hasattr(token, "__index__") or token < 0:
                return f"completion_ids has {token!r}, which is no token id"
            if token >= known:
                return f"completion_ids has {token!r}, but the model's tokens are 0 to {known - 1}"
    for name in ("model_mask", "sampler_logprobs"):
        values = getattr(rollout, name)
        if values is not None and len(values) != len(ids):
            return f"{name} has {len(values)} values for {len(ids)} completion tokens"
    if logprobs is not None and set(map(type, logprobs)) != {float}:
        odd = [value for value in logprobs if not hasattr(value, "__float__")]
        if odd:
            return f"sampler_logprobs has {odd[0]!r}, which is no number"
    if rollout.model_mask is not None and not any(rollout.model_mask):
        return "model_mask is False for every token: the model wrote none"
    return (
        (_turns_problem(rollout) if rollout.turns else "")
        or (_plain_problem(rollout.extra, "extra") if rollout.extra else "")
        or (_episode_problem(rollout.episode, len(rollout.turns) or 1) if rollout.episode is not None else "")
    )


def _is_reason(reason: Any) -> bool:
    return isinstance(reason, str) and bool(reason)


def _turns_problem(rollout: Rollout) -> str:
    count, end = len(rollout.completion_ids), 0
    written = [False] * count
    for place, turn in enumerate(rollout.turns):
        if not end <= turn.start < turn.end <= count:
            return f"turn {place} is tokens {turn.start} to {turn.end}, after token {end} and of {count}"
        if not _is_reason(turn.finish_reason):
            return f"turn {place} has the finish_reason {turn.finish_reason!r} and no text"
        if turn.reward is not None and not math.isfinite(turn.reward):
            return f"turn {place} has the reward {turn.reward}; it is finite, or None"
        end = turn.end
        written[turn.start : end] = [True] * (end - turn.start)
    mask = [True] * count if rollout.model_mask is None else [bool(each) for each in rollout.model_mask]
    for place, (is_written, is_masked) in enumerate(zip(written, mask, strict=True)):
        if is_written != is_masked:
            where = "in a turn" if is_written else "in no turn"
            return f"model_mask is {is_masked} at token {place}, which is {where}"
    return ""


def _episode_problem(episode: Episode, turns: int) -> str:
    """Find what is wrong with the conversation of a rollout."""
    for message in episode.messages:
        if not (type(message) is dict and isinstance(message.get("role"), str)):
            return f"episode has the message {shorten(repr(message), 60)}, which is no dict with a role"
    for result in episode.results:
        if not 0 <= result.turn < turns:
            return f"episode has a call of tool {result.call.name!r} in turn {result.turn} of {turns}"
        if result.failure not in get_args(CallFailure):
            allowed = ", ".join(filter(None, get_args(CallFailure)))
            return f"episode has a call of tool with failure {result.failure!r}; it is {allowed} or empty"
    if episode.times and len(episode.times) != turns:
        return f"episode has times of {len(episode.times)} turns, and there are {turns}"
    if not math.isfinite(episode.weight):
        return f"episode has the weight {episode.weight}"
    parts = episode.rewards or {}
    if any(type(value) not in (int, float) for value in parts.values()):
        return f"episode.rewards is {shorten(repr(parts), 60)}, not numbers by name"
    plain = {"messages": list(episode.messages), "rewards": parts, "info": episode.info}
    return next(filter(None, (_plain_problem(value, f"episode.{name}") for name, value in plain.items())), "")


def _plain_problem(value: Any, name: str) -> str:
    """Find the first value that is not plain: checkpoints and the record hold plain values alone."""
    if (odd := odd_part(value, name)) is None:
        return ""
    given = f"{shorten(repr(odd[1]), 60)} ({type(odd[1]).__name__})"
    return f"{odd[0]} is {given}: it holds texts, numbers, None, and lists and dicts by text of these"
