"""The settings of `sampling` under vLLM's names, without torch: a request of any vLLM generator.

https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import Problem
from grpox_generators.generation_kwargs import refused_keys
from grpox_generators.limits import longest_completion

ALLOWED = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "logit_bias",
    "presence_penalty",
    "repetition_detection",
    "structured_outputs",
    "thinking_token_budget",
)
"""Keys of `sampling.generation_kwargs` that are passed to vLLM's SamplingParams unchanged."""

HOTTEST = 2.0
"""Highest temperature that vLLM accepts."""

OWNED = {
    "max_tokens": "sampling.max_completion_length",
    "min_tokens": "sampling.min_completion_length",
    "n": "train.num_generations",
    "seed": "train.seed",
}
"""Arguments that grpox sets -> key of the run file to use instead."""


def refused(sampling: SamplingConfig) -> list[Problem]:
    """Return one problem for each setting that vLLM does not accept."""
    problems = refused_keys(sampling, ALLOWED, OWNED, "grpox passes no such key to vLLM's SamplingParams")
    if sampling.temperature > HOTTEST:
        given, allowed = f"{sampling.temperature:g}", f"at most {HOTTEST:g}"
        what = "is higher than vLLM supports"
        problems.append(Problem(what, "sampling.temperature", given=given, allowed=allowed))
    return problems


def request_params(
    sampling: SamplingConfig, end_ids: Sequence[int], prompt: Prompt, seed: int
) -> dict[str, Any]:
    """Return the arguments of SamplingParams for the completions of one prompt.

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
