"""A run file some of whose keys are invalid, so that the checks that need only its valid keys can be done.

Invalid keys are removed, and reading one afterwards raises `InvalidKeyRead`, which ends the check that needs
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from pydantic import BaseModel, ValidationError, create_model

from grpox.config import RunConfig
from grpox.errors import Problem, join
from grpox.errors.validation import fields_by_key, problems_of
from grpox.runfile.given import GIVEN

_REQUIRED: Mapping[str, Mapping[str, Any]] = {"model": {"path": GIVEN}, "data": {"path": GIVEN}}
"""Sections that a run file must have -> placeholders of the keys that they must have."""
_COMPONENT = {"name": "length"}
"""Placeholder of an element of `rewards`: to remove it would move the others."""
_ROUNDS = 5
"""Number of times that invalid keys are removed: a section without them may be invalid as a whole."""


class InvalidKeyRead(Exception):
    """A check reads an invalid key, so that it can find nothing."""


def without_invalid(
    data: dict[str, Any], problems: Iterable[Problem]
) -> tuple[RunConfig, list[str], set[str]] | None:
    """Validate a run without its invalid keys.

    Args:
        data: sections of the run; changed.
        problems: problems of the schema, whose keys are removed.

    Returns:
        the config; the dotted keys whose values are unknown, with those that an unknown key may have meant;
        and the sections with an unknown key that may have meant any other. None if the run stays invalid.
    """
    unknown: list[str] = []
    misspelt = [problem for problem in problems if problem.what == "unknown key"]
    paths = [path_of(problem.key) for problem in problems]
    for _ in range(_ROUNDS):
        try:
            unknown += [_dotted(_remove(data, path)) for path in paths]
        except (LookupError, TypeError, ValueError):
            return None
        for name, required in _REQUIRED.items():
            if isinstance(section := data.setdefault(name, {}), dict):
                for key, value in required.items():
                    section.setdefault(key, value)
        if not data.get("rewards"):
            data["rewards"] = [dict(_COMPONENT)]
        try:
            config = RunConfig.model_validate(data)
        except ValidationError as error:
            # What is left of a section is invalid without the removed keys.
            paths = [path_of(problem.key) for problem in problems_of(error, RunConfig)]
            paths = [path[:-1] or path for path in paths]
            continue
        meant = {problem.key: _meant(config, problem) for problem in misspelt}
        unclear = {path_of(key)[0] for key, fields in meant.items() if not fields}
        return config, [*unknown, *(each for fields in meant.values() for each in fields)], unclear
    return None


def hide(config: RunConfig, keys: Iterable[str]) -> None:
    """Make reading one of these dotted keys raise `InvalidKeyRead`."""
    names: dict[int, tuple[BaseModel, set[str]]] = {}
    for path in map(path_of, keys):
        if (holder := _holder(config, path)) is not None and path[-1] in fields_by_key(type(holder)):
            names.setdefault(id(holder), (holder, set()))[1].add(path[-1])
    for holder, hidden in names.values():
        _hide_fields(holder, frozenset(hidden))


def _hide_fields(model: BaseModel, hidden: frozenset[str]) -> None:
    plain = type(model)

    def read(self: BaseModel, name: str) -> Any:
        if name in hidden:
            raise InvalidKeyRead(name)
        return plain.__getattribute__(self, name)

    partial = create_model(plain.__name__, __base__=plain)
    partial.__getattribute__ = read  # type: ignore[method-assign, assignment]
    # The checks know the object by its class and through properties: a wrapper would be neither.
    object.__setattr__(model, "__class__", partial)


def path_of(key: str) -> list[str]:
    """Split a dotted key: ``rewards[0].weight`` is rewards, 0 and weight."""
    return re.findall(r"[^.\[\]]+", key)


def _dotted(path: Sequence[str]) -> str:
    return reduce(join, [int(part) if part.isdecimal() else part for part in path], "")


def _remove(data: Any, path: Sequence[str]) -> Sequence[str]:
    """Remove a key, which may be gone, and return the path of what was removed.

    Of a list of text or numbers the whole list is removed.
    """
    for depth, part in enumerate(path[:-1]):
        holder = data
        data = data[int(part)] if isinstance(data, list) else data[part]
        if isinstance(data, list) and depth == len(path) - 2:
            if part == "rewards":
                data[int(path[-1])] = dict(_COMPONENT)
                return path
            del holder[part]
            return path[:-1]
    if not isinstance(data, dict):
        raise TypeError("not a mapping")
    data.pop(path[-1], None)
    return path


def _holder(config: RunConfig, path: Sequence[str]) -> BaseModel | None:
    """Return the model that has, or would have, the last part of `path` as a field."""
    value: Any = config
    for part in path[:-1]:
        if isinstance(value, list):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        else:
            value = (value if isinstance(value, dict) else vars(value)).get(part) if value is not None else None
        if not isinstance(value, BaseModel | list | dict):
            return None
    return value if isinstance(value, BaseModel) else None


def _meant(config: RunConfig, problem: Problem) -> list[str]:
    """List the keys that an unknown key may have meant and that the run does not set."""
    if not problem.nearest:
        return []
    beside = [*path_of(problem.key)[:-1], problem.nearest]
    return [
        _dotted(path)
        for path in (beside, path_of(problem.nearest))
        if (holder := _holder(config, path)) is not None
        and path[-1] in fields_by_key(type(holder))
        and path[-1] not in holder.model_fields_set
    ]
