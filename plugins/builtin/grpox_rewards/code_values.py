"""Values as bytes and back: who reads them gets plain values of exact types, and runs no code of the writer's.

A message is a JSON list of nodes, and the last holds the value. A node is the name of its kind, followed by
its parts: null, true, numbers and strings stand for themselves, and ``[n]`` for node number n, an earlier one.
Nothing nests deeper than that, and a list that is in two places is one list again.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any

DEEPEST = 400
"""Levels of nesting that are copied, well below Python's limit on recursion."""
TEXT = json.JSONEncoder(separators=(",", ":"), check_circular=False)
LARGEST_NUMBER = 1 << 63
"""JSON has no limit, but Python takes a time to read a long number that grows with its square."""


def _items_of(pairs: Any) -> Iterable[Any]:
    return chain.from_iterable(dict.items(pairs))


def _make_dict(*items: Any) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _days_of(duration: timedelta) -> list[int]:
    return [duration.days, duration.seconds, duration.microseconds]


# Methods of the kind itself, because a subclass may have others.
CONTAINERS: dict[type, tuple[Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    list: (list.__iter__, lambda *items: [*items]),
    tuple: (tuple.__iter__, lambda *items: items),
    set: (set.__iter__, lambda *items: {*items}),
    frozenset: (frozenset.__iter__, lambda *items: frozenset(items)),
    dict: (_items_of, _make_dict),
    OrderedDict: (_items_of, lambda *items: OrderedDict(_make_dict(*items))),
    Counter: (_items_of, lambda *items: Counter(_make_dict(*items))),
    deque: (lambda value: [value.maxlen, *value], lambda maxlen, *items: deque(items, maxlen)),
}
"""Kinds that are copied and have any parts -> how a value is taken to its parts, and made of them."""
ATOMS: dict[type, tuple[Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    int: (lambda value: [int.__format__(value, "x")], lambda text: int(text, 16)),
    str: (
        lambda value: [str.encode(value, "utf-8", "surrogatepass").hex()],
        lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    ),
    bytes: (lambda value: [bytes.hex(value)], bytes.fromhex),
    bytearray: (lambda value: [bytearray.hex(value)], bytearray.fromhex),
    complex: (lambda value: [value.real, value.imag], complex),
    range: (lambda value: [value.start, value.stop, value.step], range),
    date: (lambda value: [value.isoformat()], date.fromisoformat),
    datetime: (lambda value: [value.isoformat()], datetime.fromisoformat),
    time: (lambda value: [value.isoformat()], time.fromisoformat),
    timedelta: (_days_of, timedelta),
    timezone: (lambda value: _days_of(value.utcoffset(None)), lambda *parts: timezone(timedelta(*parts))),
    Decimal: (lambda value: [str(value)], Decimal),
    Fraction: (lambda value: [value.numerator, value.denominator], Fraction),
}
"""Kinds that are copied and have numbers and strings alone."""
PARTS = {kind: parts for kind, (parts, _) in (CONTAINERS | ATOMS).items()}
ANY_PARTS = {kind.__name__: make for kind, (_, make) in CONTAINERS.items()}
PLAIN_PARTS = {kind.__name__: make for kind, (_, make) in ATOMS.items()}
BASES = (int, float, str, list, tuple, dict, set, frozenset, complex, bytes, bytearray)
"""An object of a subclass is copied as one of these."""


def encode(value: Any, hand_over: Callable[[Any], list[Any]]) -> bytes:
    """Return `value` as bytes.

    Args:
        hand_over: gives a node for what is not copied: other objects, what is nested too deep, and a container
            where it contains itself.
    """
    nodes = _Nodes(hand_over)
    nodes.add(["tuple", nodes.put(value, 0)])
    return TEXT.encode(nodes.all).encode("ascii")


class _Nodes:
    """The nodes of one message."""

    def __init__(self, hand_over: Callable[[Any], list[Any]]) -> None:
        self.all: list[list[Any]] = []
        self._hand_over = hand_over
        self._known: dict[int, tuple[list[int] | None, Any]] = {}
        """Id -> the reference, or None inside the value itself; and the value, so that no other gets its id."""

    def add(self, node: list[Any]) -> list[int]:
        self.all.append(node)
        return [len(self.all) - 1]

    def put(self, value: Any, depth: int) -> Any:
        """Add `value`; return what stands for it among the parts of another."""
        kind = type(value)
        if kind not in PARTS:
            if value is None or kind is bool or kind is float:
                return value
            kind = next((base for base in BASES if isinstance(value, base)), kind)
        if kind is int and -LARGEST_NUMBER < value < LARGEST_NUMBER:
            return value
        if kind is float or (kind is str and _is_text(value)):
            return value
        reference, _ = self._known.get(id(value), (None, None))
        if reference is not None:
            return reference
        if kind not in PARTS or id(value) in self._known or depth > DEEPEST:
            return self.add(self._hand_over(value))
        self._known[id(value)] = (None, value)
        node = [kind.__name__]
        parts = list(PARTS[kind](value))
        for part in parts:
            node.append(self.put(part, depth + 1))
        reference = self.add(node)
        self._known[id(value)] = (reference, (value, parts))
        return reference


def _is_text(value: str) -> bool:
    """Return whether JSON gives the string back as it is: two surrogates become one character."""
    try:
        return str.isascii(value) or bool(str.encode(value))
    except UnicodeEncodeError:
        return False


def decode(data: bytes, take: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the value that `encode` made bytes of; raises some Exception where they are nothing of the kind.

    Args:
        take: makes of a node that `hand_over` gave what it stands for, by the name it begins with.
    """
    values: list[Any] = []
    for name, *parts in json.loads(data.decode("ascii")):
        items = [values[part[0]] if type(part) is list else part for part in parts]
        if name in ANY_PARTS:
            value = ANY_PARTS[name](*items)
        elif {type(item) for item in items} <= {int, float, str}:
            value = (PLAIN_PARTS.get(name) or take[name])(*items)
        else:
            raise ValueError(f"a {name} of other values")
        values.append(value)
    return values[-1][0]
