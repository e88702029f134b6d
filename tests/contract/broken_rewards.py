"""Reward functions that break their contract, each in one way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def each(score: Callable[[str], float | None]) -> Callable[..., Any]:
    """Make a reward of a function of one completion."""
    return of_call(lambda completions: [score(completion) for completion in completions])


def of_call(scores: Callable[[list[str]], Any]) -> Callable[..., Any]:
    """Make a reward of a function of the completions of a call."""

    def reward(completions: list[Any], **columns: Any) -> Any:
        return scores(completions)

    return reward


right = each(lambda text: None if text == "" else float(len(text)))
not_finite = each(lambda text: 1.0 / len(text) if text else float("inf"))
needs_a_word = each(lambda text: float(len(text.split()[0])))
the_shorter_the_better = each(lambda text: -float(len(text)))
never_the_same = each(lambda text: float(next(CALLS)))
one_number = of_call(lambda texts: 1.0)
one_too_few = of_call(lambda texts: [0.0] * (len(texts) - 1))
compares_with_others = of_call(lambda texts: [len(text) / max(1, *map(len, texts)) for text in texts])
first_is_best = of_call(lambda texts: [1.0, *[0.0] * (len(texts) - 1)])
CALLS = iter(range(10**6))


def asks_for_an_answer(completions: list[Any], answer: list[str]) -> list[float]:
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


def of_other_data(completions: list[Any], answer: list[str]) -> list[None]:
    return [None] * len(completions)


def strips_in_place(completions: list[Any], **columns: Any) -> list[float]:
    completions[:] = [str(completion)[:3] for completion in completions]
    return [0.0] * len(completions)


class KeepsState:
    """Stores data of one call on the object."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, *, completions: list[Any], **columns: Any) -> list[float]:
        self.seen = []
        for completion in completions:
            time.sleep(0.01)
            self.seen.append(float(len(completion)))
        return self.seen


class UsesOrder:
    """The first number counts, on purpose."""

    uses_order = True

    def __call__(self, *, completions: list[Any], **columns: Any) -> list[float]:
        return first_is_best(completions)
