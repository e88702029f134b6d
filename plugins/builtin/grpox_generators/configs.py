"""Parameters of the built-in generators."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpox.config import SamplingConfig
from grpox.errors import Problem
from grpox_generators.generation_kwargs import unknown_kwargs


class HfConfig(BaseModel):
    """transformers' own generate."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    batch_size: int = Field(1024, ge=1)
    """Completions sampled together on one rank; fewer need less memory."""
    cache_implementation: Literal["dynamic", "static", "offloaded", "offloaded_static", "quantized"] = "dynamic"
    """Where keys and values are kept: transformers' name. Only dynamic shares a prompt's within its group."""
    gather_weights: bool = True
    """Keep a whole copy of the policy on each rank; false generates through the ZeRO-3 shards, slower, without
    that memory (TRL's ds3_gather_for_generation)."""
    continuous_batching: bool = False
    """Let a new completion take the place of each that ends (transformers' paged attention)."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.continuous_batching and not self.gather_weights:
            raise ValueError("continuous_batching needs a copy of the weights: gather_weights must be true")
        if self.continuous_batching and self.cache_implementation != "dynamic":
            raise ValueError(
                "continuous_batching has a cache of its own: cache_implementation "
                f"{self.cache_implementation} cannot go with it"
            )
        return self

    def check_sampling(self, sampling: SamplingConfig) -> list[Problem]:
        """What of `sampling` hf cannot honour with these parameters."""
        problems = unknown_kwargs(sampling)
        if not self.continuous_batching:
            return problems
        # Its logits processors see the last token alone, and its requests end at tokens alone.
        refused = {
            "min_completion_length": sampling.min_completion_length > 0,
            "repetition_penalty": sampling.repetition_penalty != 1,
            "stop": bool(sampling.stop),
            "generation_kwargs": bool(sampling.generation_kwargs),
        }
        return problems + [
            Problem(
                "transformers' continuous batching cannot do this",
                key=f"sampling.{name}",
                given=f"{getattr(sampling, name)} with generator.continuous_batching true",
                allowed=f"generator.continuous_batching false, or sampling without {name}",
            )
            for name, given in refused.items()
            if given
        ]
