"""Bad run files made from the schema: every key of every section, with each kind of mistake that it allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from fuzz_case import Case, changed, run_file
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpox.config import ComponentRef, RewardRef, RunConfig, Section
from grpox.config.run import SECTIONS
from grpox.errors.validation import fields_by_key
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry

LIST = ["a list", ["of lists"]]
PLACES = {
    "generator": "generator",
    "advantage": "advantage",
    "loss": "loss",
    "correction": "correction",
    "reward": "rewards.0",
}
"""Key of a run file that names a component of each kind."""
NEEDED: dict[str, dict[str, Any]] = {
    "evaluation": {"evaluation.path": "../shared/train.jsonl"},
    "hub": {"hub.repo": "user/name"},
    "data.source": {"data.path": None},
}
"""Further keys that a key requires."""


def schema_cases() -> list[Case]:
    """All of them; each has a name of its own."""
    return [*_section_cases(), *_parameter_cases()]


def _section_cases() -> Iterator[Case]:
    for key, field in _keys(RunConfig, ""):
        yield from _cases(key, field)


def _keys(model: type[BaseModel], above: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        key = f"{above}.{name}" if above else name
        yield key, field
        if not above and name in SECTIONS:
            yield from _keys(SECTIONS[name], name)
    if not above:
        for name in ("weight", "on_error", "timeout"):
            yield f"rewards.0.{name}", RewardRef.model_fields[name]


def _cases(key: str, field: FieldInfo) -> Iterator[Case]:
    for value in _wrong_values(field):
        yield Case(f"{_shown(key)} of {value!r}", run_file(_with_needed(key, value)), (_shown(key),))


def _with_needed(key: str, value: Any) -> dict[str, Any]:
    """`RUN` with a wrong value, and with what that key asks for besides."""
    needed = [
        more for above, more in NEEDED.items() if key.startswith(f"{above}.") or key == above == "data.source"
    ]
    return changed({k: v for more in needed for k, v in more.items()} | {key: value})


def _wrong_values(field: FieldInfo) -> list[Any]:
    """A value for each mistake that a field of this type allows."""
    annotation = field.annotation
    members = get_args(annotation) if type(None) in get_args(annotation) else (annotation,)
    origins = [get_origin(member) for member in members]
    if {int, float} & set(members):
        return ["much", True, math.inf, *_beyond_bounds(field), *([] if float in members else [1.5])]
    if bool in members:
        return ["perhaps", 2]
    if Literal in origins:
        return ["sometimes", LIST]
    if any(_is(member, ComponentRef) for member in members):
        both = {"name": "a", "path": "b.py:c"}
        return [7, "no-such-thing", {"weight": 1}, both, {"path": "absent.py:Thing"}]
    if list in origins:
        return ["much", [{"value": 1}]]
    if dict in origins or any(_is(member, Section) for member in members):
        return ["much", LIST]
    return [17, {"value": 1}] if str in members else []


def _beyond_bounds(field: FieldInfo) -> list[Any]:
    steps = {"gt": 0, "ge": -1, "lt": 0, "le": 1}
    limits = [(getattr(bound, name, None), step) for bound in field.metadata for name, step in steps.items()]
    return [limit + step for limit, step in limits if limit is not None]


def _is(member: Any, model: type) -> bool:
    return isinstance(member, type) and issubclass(member, model)


def _shown(key: str) -> str:
    return key.replace("rewards.0", "rewards[0]")


def _parameter_cases() -> Iterator[Case]:
    """Parameters of the components that come with grpox: of a wrong type, beyond bounds, unknown."""
    registry = Registry(discover(()))
    for offer in registry.plugins.offers:
        if offer.distribution != "grpox" or offer.kind not in PLACES:
            continue
        model, key = registry.config_model(offer), PLACES[offer.kind]
        wrong: list[tuple[str, Any]] = [("no_such", 1)]
        for name, field in fields_by_key(model).items() if model else ():
            wrong += [(name, value) for value in (*_wrong_values(field)[:1], *_beyond_bounds(field))]
        for name, value in wrong:
            run = changed({key: {"name": offer.spec.name, name: value}})
            shown = "no_such" if name == "no_such" else f"{_shown(key)}.{name}"
            yield Case(f"{shown} of {offer.kind} {offer.spec.name}: {value!r}", run_file(run), (shown,))
