"""Rewards that depend only on a completion's text, its length or its episode: exact, regex, format, length,
soft_overlong, cosine, repetition and environment."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

import regex

from grpox.contracts import FailedScore, Text, completion_text
from grpox_rewards.configs import (
    CosineConfig,
    EnvironmentConfig,
    ExactConfig,
    FormatConfig,
    LengthConfig,
    MathConfig,
    RegexConfig,
    RepetitionConfig,
    SoftOverlongConfig,
)


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
        scores = list[float | None]()
        for completion, answer in zip(completions, columns[self.config.column], strict=True):
            text = completion if isinstance(completion, str) else completion_text(completion)
            wanted = str(answer)
            if self.config.strip:
                text, wanted = text.strip(), wanted.strip()
            if self.config.ignore_case:
                text, wanted = text.casefold(), wanted.casefold()
            scores.append(None if answer is None else float(text == wanted))
        return scores


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
        distances = [abs(length - self.config.target) for length in lengths]
        if self.config.scale == "absolute":
            return [-float(distance) for distance in distances]
        return [max(-1.0, -distance / self.config.target) for distance in distances]


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


class Cosine:
    """`end + (start - end) (1 + cos(pi length / max_length)) / 2`, with start and end by correctness.

    A right answer scores `max_value_correct` at length 0 and `min_value_correct` at max_length. A wrong one
    scores `min_value_wrong` and `max_value_wrong`: a short wrong answer is the worst, so that the model thinks
    longer where it fails (arXiv 2502.03373, appendix C.1). Lengths are in tokens that the model wrote,
    including the ending EOS.
    """

    def __init__(self, config: CosineConfig) -> None:
        self.config = config
        self.reads_columns = config.reads_columns
        self._judge: Callable[..., list[float | None]] = Exact(ExactConfig(column=config.column))
        if config.correct_by == "math":
            from grpox_rewards.math import Math

            self._judge = Math(MathConfig(column=config.column))

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        log_metric: Callable[[str, float], None] | None = None,
        model_masks: Sequence[Sequence[bool]] | None = None,
        prompt_ends: Sequence[str] = (),
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; None if the judge of correctness abstains."""
        given = columns | {"completions": completions, "log_metric": log_metric, "prompt_ends": prompt_ends}
        tokens = model_tokens(completion_ids, model_masks)
        return [
            None if verdict is None else self._score(verdict > 0, len(ids))
            for verdict, ids in zip(self._judge(**given), tokens, strict=True)
        ]

    def _score(self, is_right: bool, length: int) -> float:
        config = self.config
        if length > config.max_length and config.exceeded is not None:
            return config.exceeded
        start, end = config.max_value_correct, config.min_value_correct
        if not is_right:
            start, end = config.min_value_wrong, config.max_value_wrong
        progress = min(1.0, length / config.max_length)
        return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


class Repetition:
    """`distinct n-grams / n-grams - 1`, 0 for fewer than `size` units (arXiv 2502.03373, appendix C.2)."""

    def __init__(self, config: RepetitionConfig) -> None:
        self.config = config

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        model_masks: Sequence[Sequence[bool]] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return one score in (-1, 0] per completion."""
        texts: Sequence[Sequence[Hashable]] = model_tokens(completion_ids, model_masks)
        if self.config.unit == "words":
            texts = [completion_text(completion).lower().split() for completion in completions]
        size = self.config.size
        grams = [[tuple(text[at : at + size]) for at in range(len(text) - size + 1)] for text in texts]
        return [len(set(each)) / len(each) - 1 if each else 0.0 for each in grams]


class EnvironmentReward:
    """The sum of the parts of the environment's reward, or one part; None where the environment abstained."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config

    def __call__(
        self, *, environment_rewards: Sequence[Mapping[str, float] | None], **columns: Any
    ) -> list[float | None]:
        """Return one score per completion."""
        return [None if parts is None else self._score(parts) for parts in environment_rewards]

    def _score(self, parts: Mapping[str, float]) -> float:
        name = self.config.part
        if name is None:
            return math.fsum(parts.values())
        if name in parts:
            return parts[name]
        known = "a single number, which has no parts" if set(parts) == {""} else ", ".join(map(repr, parts))
        return FailedScore(f"the environment's reward has no part {name!r}; it has {known or 'none'}")
