"""Plain values of environments, and texts that are equal for equal states in every process."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from grpox.plugins.component_state import NotPlain
from grpox.rollout.episodes.plain_values import LONGEST_KEY, plain_value, state_text


class Way(Enum):
    UP = 1


class Level(IntEnum):
    ONE = 1


@dataclass(frozen=True)
class Cell:
    row: int
    column: int
    seen: int = field(default=0, compare=False)


Point = namedtuple("Point", "x y")
EQUAL: list[tuple[Any, ...]] = [
    (1, 1.0, True, Decimal(1), Fraction(1), np.int64(1), np.float32(1), Level.ONE),
    (0.0, -0.0),
    ((1, "a"), (1.0, "a"), Point(1, "a")),
    (frozenset("abc"), frozenset("cba"), {"b", "c", "a"}),
    ({"a": 1, "b": (2,)}, {"b": (2.0,), "a": 1}),
    (Cell(1, 2), Cell(1, 2, seen=5)),
    ("1",),
    (b"a",),
    (("1", "a"),),
    ([1, "a"],),
    (Way.UP,),
    ((Way.UP, None),),
    (Cell(2, 1),),
    ("x" * 200,),
    ("x" * 201,),
    ("a, b",),
    (("a", "b"),),
    ("",),
    ((),),
    (frozenset(),),
]


def test_texts_are_equal_exactly_where_the_values_are() -> None:
    texts = [{state_text(value) for value in values} for values in EQUAL]
    assert [len(each) for each in texts] == [1] * len(EQUAL)
    assert len(set().union(*texts)) == len(EQUAL)
    assert all(len(text) <= LONGEST_KEY for each in texts for text in each if text)
    assert state_text(None) is None


def test_a_text_is_the_same_in_every_process() -> None:
    code = (
        "from grpox.rollout.episodes.plain_values import state_text\n"
        "print(state_text((frozenset(map(str, range(9))), {'b': 1, 'a': {'x', 'y'}})))"
    )
    python = [sys.executable, "-c", code]
    one, other = (subprocess.check_output(python, env={"PYTHONHASHSEED": seed}) for seed in ("1", "2"))
    assert one == other != b""


@pytest.mark.parametrize("value", [object(), (1, [object()]), lambda: 0, Cell])
def test_an_object_whose_equality_nobody_knows_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain, match="whose equality has no text"):
        state_text(value)


def test_plain_values_are_copied_and_scalars_of_numpy_become_numbers() -> None:
    inner = [1, None, "a", np.float32(0.5), np.bool_(True), (2,)]
    copy = plain_value({"a": inner}, "info")
    assert copy == {"a": [1, None, "a", 0.5, True, [2]]}
    assert [type(each) for each in copy["a"]] == [int, type(None), str, float, bool, list]
    assert copy["a"] is not inner


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {1: 2}}, "info['a'] has a key of type int; keys are text"),
        ({"a": [0, {3}]}, "info['a'][1] is a set"),
        ({"a": np.zeros(2)}, "info['a'] is a ndarray"),
        ({"a": Way.UP}, "info['a'] is a Way"),
    ],
)
def test_other_values_are_refused_with_their_place(value: Any, place: str) -> None:
    with pytest.raises(NotPlain) as caught:
        plain_value(value, "info")
    assert str(caught.value).startswith(place)
