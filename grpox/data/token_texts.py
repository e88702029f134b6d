"""The text of each token of a completion, such that the texts put together are the completion.

Tokenizers decode whole sequences. A character can be split over several tokens, and a decoder can write a token
otherwise at the beginning than behind another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Text of a character's bytes while some are missing."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, so the most tokens that one can be split over."""
SLACK = 8
"""Characters by which a token's text may lie further on than the end of the last one, such as a lost space."""


class TokenTexts:
    """Splits the text of completions into that of their tokens; special tokens have an empty one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        """A plain token, behind which any other is written as within a text."""
        self._behind: dict[int, str] = {}
        """Text of each token seen so far, behind another one."""

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; together they are the completion's text without special tokens.

        A character that is split over several tokens is the text of the last of them. A decoder that writes a
        text otherwise than token by token leaves what does not fit to the tokens that follow.
        """
        if not ids:
            return []
        whole = self._decode(ids)
        texts = [self._decode(ids[:1]), *map(self._text_behind, ids[1:])]
        return texts if "".join(texts) == whole else _aligned(self._streamed(ids), whole)

    def special(self, token: int) -> str | None:
        """Return the name of a special token, such as ``<|im_end|>``; None for any other."""
        return str(self._tokenizer.convert_ids_to_tokens(token)) if token in self._special else None

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _text_behind(self, token: int) -> str:
        if token not in self._behind:
            before = len(self._decode(self._before))
            self._behind[token] = self._decode([*self._before, token])[before:]
        return self._behind[token]

    def _streamed(self, ids: Sequence[int]) -> list[str]:
        """Decode token by token, each behind the last ones, and wait for the end of a character."""
        texts, begin, end = [], 0, 0  # ids[begin:end]: the tokens before, whose text is complete
        for place in range(len(ids)):
            before, now = self._decode(ids[begin:end]), self._decode(ids[begin : place + 1])
            if now.endswith(UNFINISHED) and place + 1 - end < LONGEST_CHARACTER:
                texts.append("")
                continue
            texts.append(now[len(before) :])
            begin, end = end, place + 1
        return texts


def _aligned(texts: Sequence[str], whole: str) -> list[str]:
    """Find each text in `whole`, in order, and cut `whole` behind it; the last one takes the rest."""
    cut, end = [], 0
    for text in texts:
        place = whole.find(text, end, end + len(text) + SLACK) if text else -1
        begin, end = end, place + len(text) if place >= 0 else end
        cut.append(whole[begin:end])
    cut[-1] += whole[end:]
    return cut
