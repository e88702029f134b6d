"""Entries of reasoning-gym as JSON that gives back what went in.

Scorers compare with tuples, and look up integer keys. JSON knows neither: of ``arc_agi`` a right answer would
score 0.05 after ``json.loads(json.dumps(entry))``.
"""

from __future__ import annotations

import json
from typing import Any

TUPLE = "$tuple"
ITEMS = "$items"


def encode(entry: Any) -> str:
    """`entry` as one line of JSON."""
    return json.dumps(_encoded(entry), ensure_ascii=False)


def decode(text: str) -> Any:
    """Return the entry that `encode` wrote as `text`.

    Raises:
        ValueError: `text` is no JSON.
    """
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple | list):
        items = [_encoded(item) for item in value]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _encoded(item) for key, item in value.items()}
        return {ITEMS: [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    return value


def _decoded(value: dict[str, Any]) -> Any:
    if value.keys() == {TUPLE}:
        return tuple(value[TUPLE])
    if value.keys() == {ITEMS}:
        return dict(value[ITEMS])
    return value
