"""Parameters of components that are paths of inputs: made absolute, and checked to be there.

Which ones are is told by their type in the component's config: see `grpox.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from grpox.config import RunConfig
from grpox.contracts import Input
from grpox.errors import Problem
from grpox.plugins.component import BoundComponent
from grpox.runfile.input_paths import input_path, model_problems, sibling
from grpox.runfile.slots import selected


def resolve_parameters(
    config: RunConfig, components: dict[str, BoundComponent], base_of: Callable[[str], Path]
) -> list[Problem]:
    """Make the input paths among components' parameters absolute, in `config` and in `components`, in place.

    Args:
        components: by key; those that could not be bound are missing.
        base_of: dotted key -> the folder against which a relative path given there resolves.

    Returns:
        a problem for each path under which the input is not.
    """
    problems: list[Problem] = []
    for key, kind, reference in selected(config):
        bound = components.get(key)
        if bound is None or bound.config is None:
            continue
        params = config.tracking[key.removeprefix("tracking.")] if kind == "observer" else reference.model_extra
        for name, field, what in _input_fields(type(bound.config)):
            given = getattr(bound.config, field)
            if given is None or not params or name not in params:  # a default is the component's own affair
                continue
            place = f"{key}.{name}"
            path = _absolute(given, base_of(place), what)
            params[name] = path
            bound = replace(bound, config=bound.config.model_copy(update={field: path}))
            problems += _problems(place, path, what)
        components[key] = bound
    return problems


def _absolute(path: str, base: Path, what: Input) -> str:
    return input_path(path, base) if what is Input.MODEL else str((base / Path(path).expanduser()).resolve())


def _problems(key: str, given: str, what: Input) -> Iterator[Problem]:
    if what is Input.MODEL:
        yield from model_problems(key, given)
    elif not Path(given).exists():
        near = sibling(Path(given), Path.exists)
        yield Problem("no such file or folder", key=key, given=given, nearest=near)


def _input_fields(model: type[BaseModel]) -> Iterator[tuple[str, str, Input]]:
    """(key in the run file, name of the field, what it is the path of), of each field that is such a path."""
    for name, field in model.model_fields.items():
        marks = [*field.metadata, *_marks(field.annotation)]
        what = next((mark for mark in marks if isinstance(mark, Input)), None)
        if what is not None:
            yield field.alias or name, name, what


def _marks(annotation: Any) -> Iterator[Any]:
    """What `Annotated` says of a type or of a member of a union."""
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for member in get_args(annotation):
        yield from _marks(member)
