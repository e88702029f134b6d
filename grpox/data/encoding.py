"""Texts as tokens. What an outsider wrote stays text, also where it reads like a special token.

Such a text is cut behind its first character by a mark that goes through the chat template with it. The pieces
are encoded apart, so that none is the special token. A text without a mark is encoded as a whole.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT = f"{secrets.randbits(64):020}"
"""Mark of a cut: digits, which templates and JSON leave as they are, and which nobody can guess."""
Ids = tuple[int, ...]


class Encoding:
    """Encodes prompts; the tokens `around` a message and a turn count as special, which some do not declare."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, around: Callable[[], tuple[str, str]]) -> None:
        self._tokenizer, self._around = tokenizer, around

    @cached_property
    def _special(self) -> tuple[set[str], list[int], re.Pattern[str]]:
        """Special tokens of more than one character, which can be cut; their lengths; how they begin."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        texts = {*getattr(self._tokenizer, "all_special_tokens", ()), *(t.content for t in added if t.special)}
        body, header = self._around()
        others = [t.content for t in added if not (t.content[:1].isalnum() or t.content[-1:].isalnum())]
        texts |= {each for each in others if each in body}
        texts |= set(sorted((each for each in others if each in header), key=header.find)[:1])
        texts = {each for each in texts if len(each.strip()) > 1}
        first = "|".join({re.escape(each[:2]) for each in texts}) or "(?!)"
        return texts, sorted({len(each) for each in texts}, reverse=True), re.compile(first)

    def _next(self, text: str, place: int = 0) -> tuple[int, str] | None:
        """Find the next special token in a text, in linear time for thousands of them."""
        texts, sizes, first = self._special
        starts = (match.start() for match in first.finditer(text, place))
        each = ((start, text[start : start + size]) for start in starts for size in sizes)
        return next((place_and_text for place_and_text in each if place_and_text[1] in texts), None)

    @cached_property
    def added(self) -> tuple[Ids, Ids]:
        """Tokens that the tokenizer adds before and behind a text."""
        for bare, whole in ((self._encode([each])[0], self._encode([each], True)[0]) for each in ("a", "0")):
            for place in range(len(whole) - len(bare) + 1) if bare else ():
                if whole[place : place + len(bare)] == bare:
                    return whole[:place], whole[place + len(bare) :]
        return (), ()

    def marked(self, value: Any) -> Any:
        """Return a text, or messages, with marks in each text of a special token."""
        if isinstance(value, str):
            cuts, place = [0], 0
            while match := self._next(value, place):
                place = match[0] + 1
                cuts.append(place)
            pieces = [value[begin:end] for begin, end in zip(cuts, [*cuts[1:], None], strict=True)]
            return type(value)(CUT.join(pieces)) if cuts[1:] else value
        if isinstance(value, Mapping):
            return {self.marked(name): self.marked(each) for name, each in value.items()}
        if not isinstance(value, list | tuple):
            return value
        texts = [each.get("text", each) if isinstance(each, Mapping) else each for each in value]
        plain = [each for each in texts if isinstance(each, str)]  # a template may trim and join them
        if plain[1:] and self._next("\n".join(["".join(plain), "".join(map(str.strip, plain))])):
            cut = [f"{CUT}{each}" if isinstance(each, str) else each for each in texts]
            value = [
                {**a, "text": b} if a is not b and isinstance(a, Mapping) else b
                for a, b in zip(value, cut, strict=True)
            ]
        return [self.marked(each) for each in value]

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of texts, without those that the tokenizer adds."""
        whole = zip(texts, self._encode(texts), strict=True)
        return [self._pieces(text) if CUT in text else ids for text, ids in whole]

    def _pieces(self, text: str) -> Ids:
        first, *others = text.split(CUT)
        # Behind a special token, a tokenizer writes no space of its own before a piece.
        _, anchor = self._next(text.replace(CUT, "")) or (0, "")
        anchor *= len(self._encode([anchor])[0]) == 1
        begin, *behind = self._encode([first, *(anchor + each for each in others)])
        return begin + tuple(token for ids in behind for token in ids[bool(anchor) :])

    def opened(self, ids: Ids, closes: bool = False) -> Ids:
        """Return a plain text behind what the tokenizer adds, once; with its end only if `closes`."""
        opening, closing = self.added
        while opening and ids[: len(opening)] == opening:
            ids = ids[len(opening) :]
        while closing and ids[-len(closing) :] == closing:
            ids = ids[: -len(closing)]
        return opening + ids + closing * closes

    def shortened(self, ids: Ids, most: int) -> Ids:
        """Return the last `most` tokens of a text; the opening token stays, also one that a template wrote."""
        opening = self.added[0] or (getattr(self._tokenizer, "bos_token_id", None),)
        count = min(len(opening), most) if ids[: len(opening)] == opening else 0
        return ids[:count] + ids[len(ids) - most + count :] if len(ids) > most else ids

    def _encode(self, texts: Sequence[str], adds: bool = False) -> list[Ids]:
        return [tuple(ids) for ids in self._tokenizer(list(texts), add_special_tokens=adds)["input_ids"]]
