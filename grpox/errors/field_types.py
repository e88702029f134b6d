"""Fields of a pydantic model in words: what they accept, and values as a run file writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_CONSTRAINTS = {
    "gt": "> {}",
    "ge": ">= {}",
    "lt": "< {}",
    "le": "<= {}",
    "multiple_of": "a multiple of {}",
    "min_length": "(length >= {})",
    "max_length": "(length <= {})",
    "pattern": "matching {}",
}
_WORDS: Mapping[Any, str] = {
    float: "number",
    int: "integer",
    bool: "true or false",
    str: "text",
    Path: "path",
    NoneType: "null",
    Any: "anything",
}


def fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of `model` under the keys by which a user writes them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def allowed_values(field: FieldInfo) -> str:
    """What a field accepts: ``number > 0 or null``, ``token or sequence``."""
    return _in_words(field.annotation, field.metadata)


def written(value: object) -> str:
    """A value as a run file has it, cut where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return written(value.value)
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _in_words(annotation: Any, constraints: Sequence[object] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_words(arguments[0], [*arguments[1:], *constraints])
    bounds = [
        words.format(bound)
        for constraint in constraints
        for name, words in _CONSTRAINTS.items()
        if (bound := getattr(constraint, name, None)) is not None
    ]
    if origin in (Union, UnionType):
        base = " or ".join(_in_words(member) for member in arguments if member is not NoneType)
    else:
        base = _type_in_words(annotation, origin, arguments)
    text = f"{base} {' and '.join(bounds)}" if bounds else base
    return f"{text} or null" if NoneType in arguments and origin is not Literal else text


def _type_in_words(annotation: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin is Literal:
        return " or ".join(written(value) for value in arguments)
    if origin in (list, tuple, set, frozenset, Sequence):
        members = [_in_words(member) for member in arguments if member is not ...]
        return f"list of {', '.join(members)}"
    if origin in (dict, Mapping):
        return f"mapping of {_in_words(arguments[0])} to {_in_words(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(written(member) for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"mapping with {', '.join(fields_by_key(annotation)) or 'no keys'}"
    return _WORDS.get(annotation) or str(getattr(annotation, "__name__", annotation))
