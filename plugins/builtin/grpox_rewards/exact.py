"""1 if the completion equals the answer column, else 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpox.contracts import Text, completion_text
from grpox_rewards.configs import ExactConfig


class Exact:
    """``1[text = answer]``; an answer that is no string is compared as Python writes it (72, 0.5, True)."""

    def __init__(self, config: ExactConfig) -> None:
        self.config = config
        self.reads_columns = (config.column,)

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """One score per completion; None where the answer is None."""
        answers = columns[self.config.column]
        return [
            None if answer is None else float(self._plain(completion_text(text)) == self._plain(str(answer)))
            for text, answer in zip(completions, answers, strict=True)
        ]

    def _plain(self, text: str) -> str:
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text
