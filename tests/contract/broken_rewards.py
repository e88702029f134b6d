"""Reward functions that break their contract, each in one way."""

from __future__ import annotations

import time
from typing import Any


def right(completions: list[Any], **columns: Any) -> list[float | None]:
    return [None if completion == "" else float(len(completion)) for completion in completions]


def asks_for_an_answer(completions: list[Any], answer: list[str]) -> list[float]:
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


def of_other_data(completions: list[Any], answer: list[str]) -> list[None]:
    return [None] * len(completions)


def one_number(completions: list[Any], **columns: Any) -> float:
    return 1.0


def one_too_few(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * (len(completions) - 1)


def not_finite(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0 / len(completion) if completion else float("inf") for completion in completions]


def needs_a_word(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion.split()[0])) for completion in completions]


def strips_in_place(completions: list[Any], **columns: Any) -> list[float]:
    for place, completion in enumerate(completions):
        completions[place] = str(completion)[:3]
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


CALLS = iter(range(10**6))


def never_the_same(completions: list[Any], **columns: Any) -> list[float]:
    return [float(next(CALLS)) for _ in completions]


def compares_with_others(completions: list[Any], **columns: Any) -> list[float]:
    longest = max(len(completion) for completion in completions)
    return [len(completion) / max(longest, 1) for completion in completions]


def of_the_neighbour(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in [*completions[1:], completions[0]]]


def first_is_best(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0, *[0.0] * (len(completions) - 1)]


class UsesOrder:
    """The first number counts, on purpose."""

    uses_order = True

    def __call__(self, *, completions: list[Any], **columns: Any) -> list[float]:
        return first_is_best(completions)


def the_shorter_the_better(completions: list[Any], **columns: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]
