"""Requests and answers that all generators have: ends of a completion, positions, refused keys, a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpox.config import SamplingConfig
from grpox.contracts import Prompt, Rollout
from grpox.errors import ConfigError, Problem, RunFailed, nearest


def end_ids(sampling: SamplingConfig, stop_token_ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """The tokens that end a completion: those of model and tokenizer, and those of the run file.

    Raises:
        ConfigError: one of the run file's is no token of the vocabulary.
    """
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < vocabulary]
    if outside:
        what = "is not in the model's vocabulary"
        given, allowed = ", ".join(map(str, outside)), f"0 to {vocabulary - 1}"
        raise ConfigError(what, "sampling.stop_token_ids", given=given, allowed=allowed)
    return tuple(dict.fromkeys((*stop_token_ids, *sampling.stop_token_ids)))


def check_length(prompts: Sequence[Prompt], sampling: SamplingConfig, limit: int | None, whose: str) -> None:
    """Refuse what exceeds `limit` positions, those of `whose`; None is no limit.

    Raises:
        RunFailed: a prompt and its longest completion allowed do not fit together.
    """
    sizes = [(len(prompt.token_ids), longest_completion(prompt, sampling), prompt) for prompt in prompts]
    if limit is None or not sizes:
        return
    tokens, longest, prompt = max(sizes, key=lambda size: size[0] + size[1])
    if tokens + longest > limit:
        key = "sampling.max_completion_length" if prompt.max_tokens is None else "its max_tokens"
        raise RunFailed(
            f"a prompt of {tokens} tokens plus {key} {longest} exceed the {limit} positions of {whose}"
        )


def longest_completion(prompt: Prompt, sampling: SamplingConfig) -> int:
    """Return the most tokens that a completion of `prompt` may have.

    Raises:
        RunFailed: the prompt's own limit leaves no room for a token.
    """
    if prompt.max_tokens is None:
        return sampling.max_completion_length
    if prompt.max_tokens < 1:
        raise RunFailed(
            f"a prompt of group {prompt.group_id} has max_tokens {prompt.max_tokens}; at least is 1"
        )
    return prompt.max_tokens


def build_rollout(
    prompt: Prompt,
    sample: int,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    is_stopped: bool,
    version: int,
) -> Rollout:
    """Build the rollout of a completion.

    Args:
        sample: its number in the prompt's group.
        is_stopped: it has come to an end by itself, and is not only as long as it may be.
        version: the policy's.
    """
    return Rollout(
        group_id=prompt.group_id,
        sample=sample,
        prompt_ids=prompt.token_ids,
        completion_ids=tuple(token_ids),
        finish_reason="stop" if is_stopped else "length",
        policy_version=version,
        sampler_logprobs=tuple(logprobs),
    )


def refused_key(name: str, allowed: Sequence[str], owned: Mapping[str, str], what: str) -> Problem:
    """Say why a key of `sampling.generation_kwargs` is refused.

    Args:
        allowed: the keys that there may be.
        owned: those that grpox sets itself -> the key of the run file to use in its place, or none.
        what: why it is refused where grpox does not set it.
    """
    key = f"sampling.generation_kwargs.{name}"
    if name in owned:
        return Problem("grpox sets this itself", key, nearest=owned[name])
    near = nearest(name, (*allowed, *owned))
    return Problem(what, key, allowed=", ".join(allowed), nearest=owned.get(near) or near)
