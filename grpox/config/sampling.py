"""The section `sampling`."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from grpox.config.section import Section


class SamplingConfig(Section):
    max_completion_length: int = Field(256, ge=1)
    """Tokens a completion may have at most, EOS included. TRL 1.16 has 512."""
    min_completion_length: int = Field(0, ge=0)
    """Tokens before which a completion cannot end by EOS."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits in generation and in training alike; 1 samples from the policy itself."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (arXiv 1904.09751); 1 keeps every token, as GRPO assumes."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely relative to the likeliest (arXiv 2407.01082); 0 keeps all."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the logits of tokens that have occurred (CTRL, arXiv 1909.05858); 1 does nothing."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion; they stay part of it."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a completion, besides the EOS tokens of model and tokenizer."""
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator's library as it is: transformers' GenerationConfig for hf."""

    @model_validator(mode="after")
    def _can_end(self) -> Self:
        low, high = self.min_completion_length, self.max_completion_length
        if low > high:
            raise ValueError(f"min_completion_length {low} is more than max_completion_length {high}")
        if "" in self.stop:
            raise ValueError("a text in stop is empty: every completion would end at once")
        return self
