"""Values as bytes and back: the reader gets plain values of exact types, and runs no code of the writer.

A message is a JSON list of nodes; the last node has the value. A node is the name of its kind, followed by its
parts: null, booleans, numbers and strings represent themselves, and ``[n]`` refers to an earlier node number n.
There is no deeper nesting, and a list that occurs in two places is decoded as one list.
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
"""Largest depth of nesting that is copied, well below Python's limit on recursion."""
TEXT = json.JSONEncoder(separators=(",", ":"), check_circular=False)
LARGEST_NUMBER = 1 << 63
"""Limit of numbers written as JSON numbers: Python's time to read a long decimal number grows with its
square."""


def _items_of(pairs: Any) -> Iterable[Any]:
    return chain.from_iterable(dict.items(pairs))


def _make_dict(*items: Any) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _days_of(duration: timedelta) -> list[int]:
    return [duration.days, duration.seconds, duration.microseconds]


# Methods of the kind itself, because a subclass may override them.
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
"""Copied kinds with parts of any kind -> function that returns the parts of a value, function that builds
it."""
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
"""Copied kinds whose parts are only numbers and strings -> the same two functions."""
PARTS = {kind: parts for kind, (parts, _) in (CONTAINERS | ATOMS).items()}
ANY_PARTS = {kind.__name__: make for kind, (_, make) in CONTAINERS.items()}
PLAIN_PARTS = {kind.__name__: make for kind, (_, make) in ATOMS.items()}
BASES = (int, float, str, list, tuple, dict, set, frozenset, complex, bytes, bytearray)
"""Types that represent objects of their subclasses."""


def encode(value: Any, hand_over: Callable[[Any], list[Any]]) -> bytes:
    """Return `value` as bytes.

    Args:
        hand_over: returns a node for values that are not copied: other objects, deeper nesting, and a container
            inside itself.
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
        """Id -> (reference, value). The reference is None inside the value itself; the stored value keeps its
        id unique."""

    def add(self, node: list[Any]) -> list[int]:
        self.all.append(node)
        return [len(self.all) - 1]

    def put(self, value: Any, depth: int) -> Any:
        """Add `value`; return its representation among the parts of another value."""
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
    """Return whether JSON preserves the string: it joins two surrogates to one character."""
    try:
        return str.isascii(value) or bool(str.encode(value))
    except UnicodeEncodeError:
        return False


def decode(data: bytes, take: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the value that `encode` wrote.

    Args:
        take: returns the value of a node from `hand_over`, by the name with which the node begins.

    Raises:
        Exception: the bytes are not a message of `encode`.
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
