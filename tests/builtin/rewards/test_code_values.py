"""Values between the process of a completion and that of its tests: what comes back, and forged bytes."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from grpox_rewards.code_values import DEEPEST, decode, encode


def sent(value: Any) -> Any:
    """Send a value that needs no handles."""

    def refuse(held: Any) -> list[Any]:
        raise TypeError(held)

    return decode(encode(value, refuse), {})


VALUES: list[Any] = [
    *(None, True, 0, -(2**63), 2**63, 10**5000, -(10**5000), 0.1, -math.inf, 5e-324, 2j),
    *("", "a\n\0", "\ud83d\ude00", "\U0001f600", b"\0\xff", bytearray(b"ab"), range(9, 1, -2)),
    *([], (), {}, set(), frozenset({1}), [1, [2.0, ("3", {4: {5}})]], {(1, 2): None}),
    *(OrderedDict(b=1, a=2), Counter("abca"), deque([1, 2], 2), deque()),
    *(date(2024, 2, 29), time(1, 2, 3, 4), datetime(2024, 1, 2, tzinfo=UTC), timedelta(-1, 2, 3)),
    *(timezone(timedelta(hours=-3)), Decimal("1.10"), Decimal("-Infinity"), Fraction(-1, 3)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_the_same_of_the_same_type(value: Any) -> None:
    back = sent([value])[0]
    assert type(back) is type(value)
    assert back == value
    assert str(back) == str(value) if isinstance(value, Decimal | float) else True


def test_what_python_prints_alike_or_calls_equal_stays_apart_and_one_list_stays_one() -> None:
    assert [type(each) for each in sent([1, 1.0, True, "1", (1,), [1]])] == [int, float, bool, str, tuple, list]
    assert math.copysign(1, sent(-0.0)) == -1
    assert math.isnan(sent(math.nan))
    row = [0]
    first, second, third = sent([row, row, [0]])
    assert first is second
    assert first is not third


class Sly(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class SlyList(list[int]):
    def __eq__(self, other: object) -> bool:
        return True


def test_an_object_of_a_subclass_comes_back_without_what_its_class_says_of_it() -> None:
    number, numbers, found = sent((Sly(7), SlyList([Sly(7)]), defaultdict(list, a=[1])))
    assert (type(number), type(numbers), type(numbers[0]), type(found)) == (int, list, int, dict)
    assert (number, numbers, found) == (7, [7], {"a": [1]})


def test_what_is_no_plain_value_or_never_ends_goes_by_its_handle() -> None:
    kept: list[Any] = []

    def keep(value: Any) -> list[Any]:
        kept.append(value)
        return ["object", len(kept) - 1]

    loop: list[Any] = [7]
    loop.append(loop)
    nest: list[Any] = []
    for _ in range(DEEPEST * 10):
        nest = [nest]
    back = decode(encode([len, loop, nest], keep), {"object": lambda number: ("handle", number)})
    assert back[:2] == [("handle", 0), [7, ("handle", 1)]]
    assert kept[:2] == [len, loop]
    assert len(kept) == 3


FORGED = {
    "a pickle": b"\x80\x04cbuiltins\nprint\n)R.",
    "nothing": b"",
    "no value": b"[]",
    "no list": b"7",
    "no node": b"[7]",
    "nesting": b"[" * 10**5 + b"]" * 10**5,
    "a long number": b"[[" + b"9" * 10**5 + b"]]",
    "a name of Python's": b'[["name","os","system"],["tuple",[0]]]',
    "a handle that is no number": b'[["object",[0]],["tuple",[0]]]',
    "a later node": b'[["list",[1]],["list"],["tuple",[0]]]',
    "itself": b'[["list",[0]],["tuple",[0]]]',
    "a list among keys": b'[["list"],["dict",[0],1],["tuple",[1]]]',
    "a key without a value": b'[["dict",1],["tuple",[0]]]',
    "a number of a list": b'[["list"],["Fraction",[0],1],["tuple",[1]]]',
    "a fraction of nothing": b'[["Fraction",1,0],["tuple",[0]]]',
    "a date that is none": b'[["date","2024-02-30"],["tuple",[0]]]',
    "a kind that is no string": b'[[["list"],1],["tuple",[0]]]',
    "other letters": '[["str","é"],["tuple",[0]]]'.encode(),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_bytes_make_nothing_but_an_exception(name: str) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, ArithmeticError, RecursionError)):
        decode(FORGED[name], {"object": lambda number: number})
