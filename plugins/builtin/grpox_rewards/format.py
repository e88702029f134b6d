"""1 if the completion consists of the tagged blocks, in order, each once, else 0.

Source: the format reward of DeepSeek-R1, arXiv 2501.12948, section 2.2.2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpox.contracts import Text, completion_text
from grpox_rewards.configs import FormatConfig


class Format:
    """``<think>...</think> <answer>...</answer>`` and nothing else but white space; blocks may be empty."""

    def __init__(self, config: FormatConfig) -> None:
        marks = [mark for tag in config.tags for mark in (f"<{tag}>", f"</{tag}>")]
        if config.opened:
            marks = marks[1:]
        blocks = "".join(
            f".*?{re.escape(mark)}" if mark.startswith("</") else rf"\s*{re.escape(mark)}" for mark in marks
        )
        self._marks = marks
        self._forbidden = f"<{config.tags[0]}>" if config.opened else None
        self._shape = re.compile(blocks + (".*" if config.text_after else r"\s*"), re.DOTALL)

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        """One score per completion."""
        return [float(self._fits(completion_text(completion))) for completion in completions]

    def _fits(self, text: str) -> bool:
        # Each mark once, so that a block cannot hold another: then a match is the only one there can be.
        once = all(text.count(mark) == 1 for mark in self._marks)
        reopened = self._forbidden is not None and self._forbidden in text
        return once and not reopened and self._shape.fullmatch(text) is not None
