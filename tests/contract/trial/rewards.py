"""Rewards as a researcher writes them from the documentation alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

from pydantic import BaseModel

from grpox.contracts import Text, completion_text


class Judge:
    """Score of a judge behind HTTP, which answers {"text": ...} by {"score": ...}; it fails if that does."""

    class Config(BaseModel):
        url: str
        seconds: float = 10.0

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self._ask, map(completion_text, completions)))

    def _ask(self, text: str) -> float:
        body = json.dumps({"text": text}).encode()
        request = Request(self.config.url, body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=self.config.seconds) as answer:
            return float(json.load(answer)["score"])


class Digits:
    """Process reward: half a point for each part between separators that is a number."""

    per = "separator"
    separator = "+"

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[list[float]]:
        parts = (completion_text(text).split(self.separator) for text in completions)
        return [[0.5 * part.strip().isdigit() for part in each] for each in parts]


def close(completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Share of the digits that are right, from the last."""
    return [
        _share(completion_text(text).strip(), str(right))
        for text, right in zip(completions, answer, strict=True)
    ]


def _share(text: str, right: str) -> float:
    same = sum(a == b for a, b in zip(reversed(text), reversed(right), strict=False))
    return same / max(len(text), len(right), 1)
