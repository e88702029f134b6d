"""Texts that end a completion: it ends with the first token that completes one of them.

Looked for in the decoded text, not in the tokens' spellings, because a character may be spread over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria


class StopTexts(StoppingCriteria):  # type: ignore[misc]
    """Ends rows whose completion completes a stop text, and remembers where.

    Args:
        texts: what to stop at; none are allowed to be empty.
        tokenizer: decodes; special tokens are part of the text.
        rows: N, completions in the batch.
        prompt_length: columns of the prompt; a text that began there does not count.
        min_length: a text completed by one of so many first tokens does not count, as no EOS can be among them.
    """

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        rows: int,
        prompt_length: int,
        min_length: int,
    ) -> None:
        self.texts = texts
        self.tokenizer = tokenizer
        self.prompt_length = prompt_length
        self.min_length = min_length
        self.ends: list[int | None] = [None] * rows
        """Tokens of each completion up to and including the one that completed a text; None: none did."""
        self._running = list(range(rows))
        # A token holds at least a byte. Four more, so that the first character of the text is whole.
        self._window = max((len(text.encode()) for text in texts), default=0) + 4
        self._may_complete: dict[int, bool] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        length = input_ids.shape[1] - self.prompt_length
        if self.texts and length > self.min_length:
            tails = input_ids[:, -min(length, self._window) :].tolist()
            for row, tail in zip(self._running, tails, strict=True):
                if self.ends[row] is None and self._candidate(tail[-1]) and self.completes(tail):
                    self.ends[row] = length
        return torch.tensor([self.ends[row] is not None for row in self._running], device=input_ids.device)

    def keep(self, kept: Tensor) -> None:
        """Go on with the rows bool[B] of those of the last call."""
        self._running = [row for row, stays in zip(self._running, kept.tolist(), strict=True) if stays]

    def completes(self, token_ids: list[int]) -> bool:
        """Whether the last of `token_ids` completes a stop text."""
        before, text = self._decode(token_ids[:-1]), self._decode(token_ids)
        # The last token may also change what came before it: the parts of a character become whole.
        pairs = enumerate(zip(before, text, strict=False))
        known = next((place for place, (old, new) in pairs if old != new), len(before))
        return any(text.rfind(stop) + len(stop) > known for stop in self.texts if stop in text)

    def _candidate(self, token_id: int) -> bool:
        """Whether a text could end in this token; most cannot, and what came before need not be decoded."""
        if token_id not in self._may_complete:
            alone = self._decode([token_id])
            # White space and parts of characters look different alone.
            unclear = not alone.strip() or "\ufffd" in alone
            self._may_complete[token_id] = unclear or any(
                text[-1] in alone or text[-1].isspace() for text in self.texts
            )
        return self._may_complete[token_id]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
