"""Keys of `sampling.generation_kwargs` that hf passes to transformers; listed here so that torch is not
imported.

The other keys are either set by grpox or belong to another decoding method than sampling token by token.
"""

from __future__ import annotations

from grpox.config import SamplingConfig
from grpox.errors import Problem
from grpox_generators.limits import refused_key

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
"""Keys that change the distribution, in greedy decoding too."""

OF_ROWS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "watermarking_config")
"""Keys whose processors remember the prompt or tokens of each row."""

WARPERS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Keys that drop tokens when sampling, but have no effect in greedy decoding."""

RUNTIME = ("cache_config", "max_cache_len", "disable_compile", "remove_invalid_values", "renormalize_logits")
"""Keys that change the computation, but not the distribution."""

OWNED = {
    "max_length": "sampling.max_completion_length",
    "max_new_tokens": "sampling.max_completion_length",
    "min_length": "sampling.min_completion_length",
    "min_new_tokens": "sampling.min_completion_length",
    "do_sample": "sampling.temperature",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "stop_strings": "sampling.stop",
    "eos_token_id": "sampling.stop_token_ids",
    "num_return_sequences": "train.num_generations",
    "cache_implementation": "generator.cache_implementation",
    "continuous_batching_config": "generator.continuous_batching",
    "pad_token_id": "",
    "bos_token_id": "",
    "use_cache": "",
    "return_dict_in_generate": "",
    "output_scores": "",
    "output_logits": "",
    "output_attentions": "",
    "output_hidden_states": "",
}
"""Keys that grpox sets -> key of the run file to use instead, or none."""

OTHER_DECODING = (
    "num_beams",
    "num_beam_groups",
    "length_penalty",
    "early_stopping",
    "diversity_penalty",
    "constraints",
    "force_words_ids",
    "penalty_alpha",
    "low_memory",
    "dola_layers",
    "guidance_scale",
    "token_healing",
    "max_time",
    "forced_bos_token_id",
    "decoder_start_token_id",
    "prefill_chunk_size",
    "compile_config",
    "use_mtp",
    "speculation_type",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "assistant_ensemble_weight",
    "target_lookbehind",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)
"""Keys of beam search, speculation, encoders and clocks: hf samples one token after another, one per
forward."""

ALLOWED = (*LOGITS, *WARPERS, *RUNTIME)


def unknown_kwargs(sampling: SamplingConfig) -> list[Problem]:
    """Return one problem for each key of `sampling.generation_kwargs` that hf does not pass to transformers."""
    return [_refusal(name) for name in sampling.generation_kwargs if name not in ALLOWED]


def _refusal(name: str) -> Problem:
    if name in OTHER_DECODING:
        key = f"sampling.generation_kwargs.{name}"
        return Problem("hf does not support this: it samples token by token", key, allowed=", ".join(ALLOWED))
    return refused_key(name, ALLOWED, OWNED, "transformers' GenerationConfig has no such key")
