"""How many tokens a prompt may have: max_prompt_length, and max_position_embeddings - max_completion_length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpox.errors import ConfigError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from grpox.config import DataConfig, SamplingConfig


@dataclass(frozen=True)
class PromptLimit:
    """The most tokens of a prompt, and what becomes of longer ones."""

    tokens: int | None
    """None: a prompt of any length will do."""
    origin: str = ""
    """Where the number comes from, for messages."""
    cut: bool = False
    """Keep the last `tokens` tokens of a longer prompt; False refuses it."""

    @classmethod
    def of_run(cls, data: DataConfig, sampling: SamplingConfig, model: PreTrainedConfig) -> PromptLimit:
        """The smaller of `data.max_prompt_length` and what the model's positions leave beside a completion.

        Raises:
            ConfigError: a completion alone fills the model's positions.
        """
        positions = getattr(model.get_text_config(), "max_position_embeddings", None)
        completion, given, cut = (
            sampling.max_completion_length,
            data.max_prompt_length,
            data.long_prompts == "cut",
        )
        if positions is None:
            return cls(given, "data.max_prompt_length", cut)
        if completion >= positions:
            what = f"leaves no room for a prompt: the model has {positions} positions"
            key = "sampling.max_completion_length"
            raise ConfigError(Problem(what, key, given=str(completion), allowed=f"less than {positions}"))
        left = positions - completion
        if given is not None and given <= left:
            return cls(given, "data.max_prompt_length", cut)
        origin = f"{positions} positions of the model less sampling.max_completion_length {completion}"
        return cls(left, origin, cut)

    def exceeded(self, length: int) -> bool:
        """Whether a prompt of `length` tokens is too long to be kept as it is."""
        return self.tokens is not None and length > self.tokens

    def shortened(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The last `tokens` of a prompt that is too long, where it may be cut."""
        return ids[-self.tokens :] if self.cut and self.tokens is not None else ids

    def problem(self, row: str, length: int, further: str = "") -> Problem:
        """That the prompt of `row` (as ``row 3 (from 0) of the data``) is too long."""
        return Problem(
            f"the prompt of {row} is too long{further}",
            key="data.max_prompt_length",
            given=f"{length} tokens",
            allowed=f"{self.tokens} ({self.origin}); long_prompts: cut keeps that many from the end",
        )
