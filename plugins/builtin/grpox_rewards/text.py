"""Rewards that depend only on a completion's text or length: exact, regex, format, length and soft_overlong."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import regex

from grpox.contracts import Text, completion_text
from grpox_rewards.configs import ExactConfig, FormatConfig, LengthConfig, RegexConfig, SoftOverlongConfig


def model_tokens(
    completion_ids: Sequence[Sequence[int]], model_masks: Sequence[Sequence[bool]] | None
) -> list[Sequence[int]]:
    """Select the tokens of each completion that the model wrote.

    Args:
        model_masks: True for these; None: all tokens are the model's.
    """
    if model_masks is None:
        return list(completion_ids)
    return [list(compress(*each)) for each in zip(completion_ids, model_masks, strict=True)]


PATTERN_SECONDS = 1.0
"""Time limit of a user's pattern on one text."""
_BRACE = re.compile(r"(\\N\{[^}]*\}|\\.)|\{(?!(?:\d+(?:,\d*)?|,\d*)\})", re.DOTALL)


def limited(method: str, pattern: str, flags: int = 0) -> Callable[[str], Any]:
    """Return a method of a user's pattern, which raises TimeoutError after `PATTERN_SECONDS`.

    It is run by `regex`, since nothing interrupts `re`; a brace that is text to `re` is text here, too.
    """
    compiled = regex.compile(_BRACE.sub(lambda match: match[1] or r"\{", pattern), flags)
    return partial(getattr(compiled, method), timeout=PATTERN_SECONDS, concurrent=True)


class Exact:
    """``1[text = answer]``; an answer that is not a string is compared as Python prints it (72, 0.5, True)."""

    def __init__(self, config: ExactConfig) -> None:
        self.config = config
        self.reads_columns = config.reads_columns

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """Return one score per completion; None if the answer is None."""
        answers = columns[self.config.column]
        return [
            None if answer is None else float(self._plain(completion_text(text)) == self._plain(str(answer)))
            for text, answer in zip(completions, answers, strict=True)
        ]

    def _plain(self, text: str) -> str:
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text


class Regex:
    """`match` if the pattern is found (and its group equals the column, if given), else `no_match`.

    A completion on which the pattern takes longer than `PATTERN_SECONDS` counts as not matching.
    """

    def __init__(self, config: RegexConfig) -> None:
        self.config = config
        self.reads_columns = config.reads_columns
        self._find = limited("fullmatch" if config.full else "search", config.pattern, config.flags)

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; None if the compared column is None."""
        matches, late = list[Any](), 0
        for completion in completions:
            try:
                matches.append(self._find(completion_text(completion)))
            except TimeoutError:
                matches.append(None)
                late += 1
        if log_metric is not None:
            log_metric("regex/timeouts", late / len(completions))
        if self.config.column is None:
            return [self._score(match is not None) for match in matches]
        return [
            None if answer is None else self._score(match is not None and self._equals(match, answer))
            for match, answer in zip(matches, columns[self.config.column], strict=True)
        ]

    def _equals(self, match: Any, answer: Any) -> bool:
        captured: str | None = match[self.config.group]  # None: the group is not part of the match
        return captured is not None and captured.strip() == str(answer).strip()

    def _score(self, matches: bool) -> float:
        return self.config.match if matches else self.config.no_match


class Format:
    """``<think>...</think> <answer>...</answer>`` and otherwise only white space; blocks may be empty.

    Source: the format reward of DeepSeek-R1, arXiv 2501.12948, section 2.2.2.
    """

    def __init__(self, config: FormatConfig) -> None:
        self._marks = [mark for tag in config.tags for mark in (f"<{tag}>", f"</{tag}>")]
        blocks = [
            f".*?{re.escape(mark)}" if mark.startswith("</") else rf"\s*{re.escape(mark)}"
            for mark in self._marks
        ]
        self._opened, end = int(config.opened), ".*" if config.text_after else r"\s*"
        # By the number of marks that stand in the prompt.
        self._shapes = [
            re.compile("".join(blocks[place:]) + end, re.DOTALL) for place in range(len(self._marks) + 1)
        ]

    def __call__(
        self, *, completions: Sequence[Text], prompts: Sequence[Text] | None = None, **columns: Any
    ) -> list[float]:
        """Return one score per completion."""
        begun = map(self._begun, prompts) if prompts is not None else [self._opened] * len(completions)
        return [float(self._fits(completion_text(each), n)) for each, n in zip(completions, begun, strict=True)]

    def _begun(self, prompt: Text) -> int:
        """Count the marks in the beginning of the turn, if the prompt ends with one."""
        is_begun = not isinstance(prompt, str) and prompt and prompt[-1].get("role") == "assistant"
        text, number = completion_text(prompt[-1:]) if is_begun else "", self._opened
        while number < len(self._marks) and (place := text.find(self._marks[number])) >= 0:
            text, number = text[place + len(self._marks[number]) :], number + 1
        return number

    def _fits(self, text: str, begun: int) -> bool:
        # Each tag exactly once, so that no block contains another and at most one match is possible.
        once = all(text.count(mark) == (place >= begun) for place, mark in enumerate(self._marks))
        return once and self._shapes[begun].fullmatch(text) is not None


class Length:
    """0 at the target. Relative: -1 at length 0 and from twice the target. Absolute: ``-|length - target|``."""

    def __init__(self, config: LengthConfig) -> None:
        self.config = config

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        model_masks: Sequence[Sequence[bool]] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return one score per completion: in [-1, 0] if relative, else at most 0."""
        if self.config.unit == "tokens":
            lengths = [len(ids) for ids in model_tokens(completion_ids, model_masks)]
        else:
            lengths = [len(completion_text(completion)) for completion in completions]
        return [self._score(abs(length - self.config.target)) for length in lengths]

    def _score(self, distance: int) -> float:
        if self.config.scale == "absolute":
            return -float(distance)
        return max(-1.0, -distance / self.config.target)


class SoftOverlong:
    """0 up to ``max_length - buffer`` tokens, falling linearly to -1 at `max_length`, and -1 beyond.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """

    def __init__(self, config: SoftOverlongConfig) -> None:
        self.config = config

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """Return one score in [-1, 0] per completion."""
        return [self._score(len(ids)) for ids in completion_ids]

    def _score(self, length: int) -> float:
        limit, buffer = self.config.max_length, self.config.buffer
        if length <= limit - buffer:
            return 0.0
        return -1.0 if length > limit else (limit - buffer - length) / buffer
