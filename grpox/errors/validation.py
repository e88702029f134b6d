"""Turns pydantic's errors into problems of a run file: dotted key, given, allowed, and nearest name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from grpox.errors import Problem, join, nearest
from grpox.errors.redaction import redacted

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


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
MOST = 200
"""Largest number of reported problems: finding the nearest name of each takes time."""


def problems_of(
    error: ValidationError, model: type[BaseModel], key: str = "", also: Iterable[str] = ()
) -> list[Problem]:
    """Turn a validation error of the data under `key` of a run file into problems, one for each key.

    Args:
        error: raised by validating against `model`.
        model: gives the allowed names and the types and bounds of fields, also of nested models.
        key: dotted key of the data; empty at the top of the file.
        also: names allowed beside the model's fields, such as `weight` beside a reward's parameters.
    """
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        path, holder, field = _locate(model, detail["loc"], detail["type"])
        dotted = reduce(join, path, key)
        # The members of a union all report the same key; the first report is enough.
        if dotted not in problems and len(problems) < MOST:
            names = [*fields_by_key(holder), *(also if holder is model else ())]
            given = written(redacted(detail["input"], dotted)) if path else ""
            problems[dotted] = _problem(detail, dotted, given, names, field)
    return list(problems.values())


def _problem(
    detail: ErrorDetails, key: str, given: str, names: Sequence[str], field: FieldInfo | None
) -> Problem:
    """Turn one pydantic error at the key of `field` into a problem; `names` are allowed in the same mapping."""
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        near = nearest(str(detail["loc"][-1]), names)
        return Problem("unknown key", key, given=given, allowed=", ".join(names) or "no keys", nearest=near)
    message = re.sub("^(Input|Value error,|Assertion failed,) ", "", detail["msg"])
    what = message[:1].lower() + message[1:]
    if kind == "missing":
        what, given = "a value is required", ""
    if field is None:
        return Problem(what, key, given=given)
    literals = [member for member in _members(field.annotation) if get_origin(member) is Literal]
    words = [str(word) for member in literals for word in get_args(member)]
    near = nearest(value, words) if isinstance(value, str) else ""
    return Problem(what, key, given=given, allowed=allowed_values(field), nearest=near)


def truths_for_numbers(data: object, model: type[BaseModel], key: str = "") -> list[Problem]:
    """Find true and false where `model` wants a number: pydantic would read them as 1 and 0.

    Args:
        data: as in a run file; if it is not a mapping, pydantic refuses it.
        key: dotted key of the data; empty at the top of the file.
    """
    if not isinstance(data, Mapping):
        return []
    return [
        problem
        for name, field in fields_by_key(model).items()
        if name in data
        for problem in _truths(data[name], field.annotation, field, join(key, name))
    ]


def _truths(value: object, annotation: Any, field: FieldInfo, key: str) -> Iterator[Problem]:
    members = _members(annotation)
    if isinstance(value, bool) and {int, float} & set(members) and not {bool, Any} & set(members):
        what = "should be a number, not true or false"
        yield Problem(what, key, given=written(value), allowed=allowed_values(field))
    for member in members:
        if isinstance(member, type) and issubclass(member, BaseModel):
            yield from truths_for_numbers(value, member, key)
        elif isinstance(value, list) and get_origin(member) is list:
            for index, part in enumerate(value):
                yield from _truths(part, get_args(member)[0], field, join(key, index))


def _locate(
    model: type[BaseModel], location: Sequence[str | int], kind: str
) -> tuple[list[str | int], type[BaseModel], FieldInfo | None]:
    """Follow pydantic's location through nested models.

    Returns:
        the path without the tags that pydantic inserts for unions; the model that has, or should have, its last
        part as a field; and that field.
    """
    path: list[str | int] = []
    current: Any = model
    field: FieldInfo | None = None
    for part in location:
        members = _members(current)
        models = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
        holder = next((member for member in models if part in fields_by_key(member)), None)
        element = next((get_args(member)[-1] for member in members if _holds(member, part)), None)
        if holder is not None:
            model, field = holder, fields_by_key(holder)[str(part)]
            current = field.annotation
        elif models and kind == "extra_forbidden" and part == location[-1]:
            model, field = models[0], None
        elif element is not None:
            current, field = element, None
        else:
            continue
        path.append(part)
    return path, model, field


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [inner for member in get_args(annotation) for inner in _members(member)]
    return [annotation]


def _holds(container: Any, part: str | int) -> bool:
    """Return True if `part` is an index or key of `container`; a union's tag, such as ``list[int]``, is not."""
    if isinstance(part, int):
        return get_origin(container) in (list, tuple, set, frozenset, Sequence)
    return get_origin(container) in (dict, Mapping) and not part.endswith("]")


def fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Map the keys that a user writes to the fields of `model`."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def allowed_values(field: FieldInfo) -> str:
    """Describe the values that a field accepts: ``number > 0 or null``, ``token or sequence``."""
    return _in_words(field.annotation, field.metadata)


def written(value: object) -> str:
    """Write a value as a run file has it, cut to 100 characters."""
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
