"""Which settings of `sampling` make the distribution that is sampled from another than the trained one.

The trainer's is softmax(logits / temperature) over all tokens. What is listed changes the generator's alone.
"""

from __future__ import annotations

from grpox.config import SamplingConfig

NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_completion_length": 0,
}
"""The keys of `sampling` that do, with the value at which they do nothing."""

LOGIT_KWARGS = frozenset(
    {
        # transformers' GenerationConfig
        "bad_words_ids",
        "begin_suppress_tokens",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_eos_token_id",
        "no_repeat_ngram_size",
        "sequence_bias",
        "suppress_tokens",
        "top_h",
        "typical_p",
        "watermarking_config",
        # vLLM's SamplingParams
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "logit_bias",
        "presence_penalty",
        "structured_outputs",
        "thinking_token_budget",
    }
)
"""The keys of `sampling.generation_kwargs` that do, whatever their value."""


def changed_distribution(sampling: SamplingConfig) -> list[str]:
    """The settings in use that do, each with its value: ``["top_p 0.9"]``."""
    told = [f"{name} {getattr(sampling, name)}" for name in NEUTRAL if getattr(sampling, name) != NEUTRAL[name]]
    return told + [f"generation_kwargs.{name}" for name in sampling.generation_kwargs if name in LOGIT_KWARGS]
