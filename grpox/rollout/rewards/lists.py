"""Reward functions that return a list per completion: how long each is, and the tokens that its numbers rate.

A number lies at the last token of what it rates: ``token`` at each token, ``turn`` at the last token of each
turn, ``separator`` at the last token of each part of the completion's text. There the tokens are decoded up to
each one: the last token of a part is the first with which the decoded text begins as the completion's text does
up to the part's end. The last part ends with the completion's last token, special tokens included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpox.contracts import Rollout, completion_text

PER = ("token", "turn", "separator")
"""Values of a reward function's attribute `per`."""

Decode = Callable[[Sequence[int]], str]
"""Tokens -> text, as reward functions are given it."""


@dataclass(frozen=True)
class ListShape:
    """The declaration of a function that returns a list per completion."""

    per: str
    separator: str = ""

    @classmethod
    def of(cls, function: Any) -> ListShape | None:
        """Read the attributes `per` and `separator`; None for a function that returns one number each.

        Raises:
            ValueError: an attribute is invalid; the text continues a message after the function's name.
        """
        per = getattr(function, "per", None)
        if per is None:
            return None
        if per not in PER:
            raise ValueError(f"has per = {per!r}; it is {', '.join(PER)}, or no attribute")
        if per != "separator":
            return cls(per)
        separator = getattr(function, "separator", None)
        if not (isinstance(separator, str) and separator):
            raise ValueError(f"has per = 'separator' and separator = {separator!r}, which must be a text")
        return cls(per, separator)

    def rated_tokens(
        self, rollout: Rollout, text: str, decode: Decode, is_conversation: bool = False
    ) -> list[int]:
        """Return the last token of what each number of the list rates.

        Args:
            text: all tokens of the rollout as text.
            is_conversation: True if functions get messages, of which `separator` parts the last turn.
        """
        length = len(rollout.completion_ids)
        if self.per == "token":
            return list(range(length))
        if self.per == "turn":
            return [turn.end - 1 for turn in rollout.turns] or [length - 1]
        if is_conversation and rollout.turns:
            start, end = rollout.turns[-1].start, rollout.turns[-1].end
            ids = rollout.completion_ids[start:end]
            return [start + token for token in _ends_of_parts(decode(ids), self.separator, ids, decode)]
        return _ends_of_parts(text, self.separator, rollout.completion_ids, decode)


def lengths_of(
    shape: ListShape, arguments: Mapping[str, Any], turns: Sequence[Sequence[str]] | None = None
) -> list[int]:
    """Return the length of the list of each completion.

    Args:
        arguments: of the call, `completions` and `completion_ids` among them.
        turns: texts of the turns of each completion; default: each is one turn.
    """
    completions, ids = arguments["completions"], arguments["completion_ids"]
    turns = turns or [[completion_text(completion)] for completion in completions]
    if shape.per != "separator":
        return [len(each) for each in (ids if shape.per == "token" else turns)]
    # Of a conversation the last turn has parts.
    texts = [each if isinstance(each, str) else own[-1] for each, own in zip(completions, turns, strict=True)]
    return [text.count(shape.separator) + 1 for text in texts]


def _ends_of_parts(text: str, separator: str, token_ids: Sequence[int], decode: Decode) -> list[int]:
    """List the place of the last token of each part."""
    places: list[int] = []
    begin = text.find(separator)
    while begin >= 0:
        before = text[:begin]

        def reaches(count: int, before: str = before) -> bool:
            return decode(token_ids[:count]).startswith(before)

        first = places[-1] + 1 if places else 1
        count = first + bisect_left(range(first, len(token_ids)), True, key=reaches)
        places.append(count - 1)
        begin = text.find(separator, begin + len(separator))
    return [*places, len(token_ids) - 1]
