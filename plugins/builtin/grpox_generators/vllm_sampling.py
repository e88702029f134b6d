"""The settings of `sampling` in vLLM's names, torch-free: what a request of any vLLM generator asks for.

https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import Problem
from grpox_generators.limits import longest_completion, refused_key

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
"""Keys of `sampling.generation_kwargs` that go to vLLM's SamplingParams as they are."""

HOTTEST = 2.0
"""The highest temperature that vLLM takes."""

OWNED = {
    "max_tokens": "sampling.max_completion_length",
    "min_tokens": "sampling.min_completion_length",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "stop": "sampling.stop",
    "stop_token_ids": "sampling.stop_token_ids",
    "n": "train.num_generations",
    "seed": "train.seed",
    "ignore_eos": "",
    "logprobs": "",
    "prompt_logprobs": "",
    "detokenize": "",
    "output_kind": "",
    "include_stop_str_in_output": "",
    "skip_special_tokens": "",
}
"""Set by grpox: the key of the run file to use in its place, or none."""


def refused(sampling: SamplingConfig) -> list[Problem]:
    """One problem for each setting that vLLM does not take."""
    what = "vLLM's SamplingParams has no such key for a run file"
    unknown = [name for name in sampling.generation_kwargs if name not in ALLOWED]
    problems = [refused_key(name, ALLOWED, OWNED, what) for name in unknown]
    if sampling.temperature > HOTTEST:
        given, allowed = f"{sampling.temperature:g}", f"at most {HOTTEST:g}"
        what = "is higher than vLLM supports"
        problems.append(Problem(what, "sampling.temperature", given=given, allowed=allowed))
    return problems


def request_params(
    sampling: SamplingConfig, end_ids: Sequence[int], prompt: Prompt, seed: int
) -> dict[str, Any]:
    """The arguments of SamplingParams for the completions of one prompt.

    Args:
        end_ids: every token that ends a completion, EOS among them.
        seed: of this request; vLLM adds to it the number of the completion.
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
        # All the ends are told here, so vLLM need not know which of them the checkpoint calls EOS.
        "stop_token_ids": list(end_ids),
        "ignore_eos": True,
        "stop": list(sampling.stop),
        # Texts are only looked at for what ends a completion.
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": 0,  # that of the sampled token alone
        **sampling.generation_kwargs,
    }


def seed_of(prompt: Prompt, seed: int) -> int:
    """The prompt's own seed, or one that follows from the call's and its group alone."""
    if prompt.seed is not None:
        return prompt.seed
    return int(np.random.SeedSequence([seed, prompt.group_id]).generate_state(1)[0])
