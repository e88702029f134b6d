"""One score if a regular expression matches the completion, another if it does not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpox.contracts import Text, completion_text
from grpox_rewards.configs import RegexConfig


class Regex:
    """`match` where the pattern is found (and its group equals the column, if given), else `no_match`."""

    def __init__(self, config: RegexConfig) -> None:
        self.config = config
        self.reads_columns = () if config.column is None else (config.column,)
        compiled = re.compile(config.pattern, config.flags)
        self._find = compiled.fullmatch if config.full else compiled.search

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float | None]:
        """One score per completion; None where the compared column is None."""
        found = [self._find(completion_text(completion)) for completion in completions]
        if self.config.column is None:
            return [self._score(match is not None) for match in found]
        return [
            None if answer is None else self._score(match is not None and self._equals(match, answer))
            for match, answer in zip(found, columns[self.config.column], strict=True)
        ]

    def _equals(self, match: re.Match[str], answer: Any) -> bool:
        captured: str | None = match[self.config.group]  # None: the group took no part in the match
        return captured is not None and captured.strip() == str(answer).strip()

    def _score(self, matches: bool) -> float:
        return self.config.match if matches else self.config.no_match
