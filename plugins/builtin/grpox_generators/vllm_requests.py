"""Requests of vllm-colocate and vllm-server to vLLM, and the error for settings that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError
from grpox_generators.sampling import end_ids, longest_completions

BROKEN_OFF = ("abort", "error")
"""vLLM's reasons for a completion that did not end by itself."""


def request_params(
    seeded: Sequence[tuple[Prompt, int]],
    sampling: SamplingConfig,
    stop_token_ids: Sequence[int],
    vocabulary: int,
    positions: int | None,
    whose: str,
) -> list[dict[str, Any]]:
    """Return the arguments of vLLM's SamplingParams for the completions of each prompt.

    https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html

    Args:
        seeded: prompts, each with the seed of its request; vLLM adds the number of the completion.
        stop_token_ids: as in `GeneratorContext`.
        vocabulary: size of the model's vocabulary.
        positions: limit of prompt and completion together, beyond which vLLM would cut completions off without
            a message; None means no limit.
        whose: owner of the limit, for the message.

    Raises:
        ConfigError: a token that ends a completion is not in the vocabulary.
        RunFailed: a prompt and its longest completion do not fit together.
    """
    of_all = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        # The request names all ending tokens, so vLLM need not know which of them the checkpoint calls EOS.
        "stop_token_ids": list(end_ids(sampling, stop_token_ids, vocabulary)),
        "ignore_eos": True,
        "stop": list(sampling.stop),
        # Decoded text is needed only for stop texts.
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": 0,  # log-probability of the sampled token only
        **sampling.generation_kwargs,
    }
    limits = longest_completions([prompt for prompt, _ in seeded], sampling, positions, whose)
    least = sampling.min_completion_length
    return [
        {"n": prompt.num_samples, "seed": seed, "max_tokens": limit, "min_tokens": min(least, limit)} | of_all
        for (prompt, seed), limit in zip(seeded, limits, strict=True)
    ]


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the prompt's own seed, or one that depends only on the seed of the call and the prompt's group."""
    if prompt.seed is not None:
        return prompt.seed
    return int(np.random.SeedSequence([seed, prompt.group_id]).generate_state(1)[0])


def refused_settings(message: str, given: str = "") -> ConfigError:
    """Return the error for a sampling config that vLLM refuses with `message`."""
    return ConfigError(f"vLLM does not accept these settings: {message}", "sampling", given=given)
