"""Requests, without torch: the end of a completion, positions, a request to vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError, RunFailed


def end_ids(sampling: SamplingConfig, stop_token_ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """Return the tokens that end a completion: those of model and tokenizer, and those of the run file.

    Raises:
        ConfigError: a token of the run file is not in the vocabulary.
    """
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < vocabulary]
    if outside:
        what = "is not in the model's vocabulary"
        given, allowed = ", ".join(map(str, outside)), f"0 to {vocabulary - 1}"
        raise ConfigError(what, "sampling.stop_token_ids", given=given, allowed=allowed)
    return tuple(dict.fromkeys((*stop_token_ids, *sampling.stop_token_ids)))


def check_length(prompts: Sequence[Prompt], sampling: SamplingConfig, limit: int | None, whose: str) -> None:
    """Refuse a prompt and completion that need more than `limit` positions; None means no limit.

    Args:
        whose: owner of the limit, for the message.

    Raises:
        RunFailed: a prompt and its longest allowed completion do not fit together.
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
    """Return the largest number of tokens that a completion of `prompt` may have.

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


def request_params(
    sampling: SamplingConfig, end_ids: Sequence[int], prompt: Prompt, seed: int
) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for the completions of one prompt.

    https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html

    Args:
        end_ids: all tokens that end a completion, including EOS.
        seed: seed of this request; vLLM adds the number of the completion.
    """
    longest = longest_completion(prompt, sampling)
    return {
        "n": prompt.num_samples,
        "seed": seed,
        "max_tokens": longest,
        "min_tokens": min(sampling.min_completion_length, longest),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        # The request names all ending tokens, so vLLM need not know which of them the checkpoint calls EOS.
        "stop_token_ids": list(end_ids),
        "ignore_eos": True,
        "stop": list(sampling.stop),
        # Decoded text is needed only for stop texts.
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": 0,  # log-probability of the sampled token only
        **sampling.generation_kwargs,
    }


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the prompt's own seed, or one that depends only on the seed of the call and the prompt's group."""
    if prompt.seed is not None:
        return prompt.seed
    return int(np.random.SeedSequence([seed, prompt.group_id]).generate_state(1)[0])
