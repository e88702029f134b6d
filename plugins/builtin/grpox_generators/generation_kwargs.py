"""Keys of `sampling.generation_kwargs`, listed here so that a run file is checked without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpox.config import SamplingConfig
from grpox.errors import Problem, nearest

LOGITS = (
    "sequence_bias",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "watermarking_config",
)
"""Keys of hf that change the distribution, in greedy decoding too."""

OF_ROWS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "watermarking_config")
"""Keys of hf whose processors remember the prompt or tokens of each row."""

WARPERS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Keys of hf that drop tokens when sampling, but have no effect in greedy decoding."""

RUNTIME = ("cache_config", "max_cache_len", "disable_compile", "remove_invalid_values", "renormalize_logits")
"""Keys of hf that change the computation, but not the distribution."""

ALLOWED = (*LOGITS, *WARPERS, *RUNTIME)

OWNED = {
    "max_length": "sampling.max_completion_length",
    "max_new_tokens": "sampling.max_completion_length",
    "min_length": "sampling.min_completion_length",
    "min_new_tokens": "sampling.min_completion_length",
    "do_sample": "sampling.temperature",
    "stop_strings": "sampling.stop",
    "eos_token_id": "sampling.stop_token_ids",
    "num_return_sequences": "train.num_generations",
    "cache_implementation": "generator.cache_implementation",
    "continuous_batching_config": "generator.continuous_batching",
}
"""Keys of transformers that grpox sets -> key of the run file to use instead."""

VLLM_ALLOWED = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "logit_bias",
    "presence_penalty",
    "repetition_detection",
    "structured_outputs",
    "thinking_token_budget",
)
"""Keys that are passed to vLLM's SamplingParams unchanged."""

VLLM_OWNED = {
    "max_tokens": "sampling.max_completion_length",
    "min_tokens": "sampling.min_completion_length",
    "n": "train.num_generations",
    "seed": "train.seed",
}
"""Arguments of SamplingParams that grpox sets -> key of the run file to use instead."""


def refused_keys(
    sampling: SamplingConfig, allowed: Sequence[str], owned: Mapping[str, str], what: str
) -> list[Problem]:
    """Return one problem for each key of `sampling.generation_kwargs` that is not `allowed`.

    Args:
        owned: keys that grpox sets itself -> key of the run file to use instead.
        what: reason for keys that grpox does not set.
    """
    owned = {name: f"sampling.{name}" for name in SamplingConfig.model_fields} | dict(owned)
    problems = []
    for name in sampling.generation_kwargs:
        key = f"sampling.generation_kwargs.{name}"
        if name in owned:
            problems.append(Problem("grpox sets this itself", key, nearest=owned[name]))
        elif name not in allowed:
            near = nearest(name, (*allowed, *owned))
            problems.append(Problem(what, key, allowed=", ".join(allowed), nearest=owned.get(near) or near))
    return problems
