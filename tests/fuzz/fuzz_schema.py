"""Bad run files made from the schema: every key of every section, with each kind of mistake that it allows."""

from __future__ import annotations

import itertools
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
    for key in ("rewards.0", *SECTIONS):
        yield from _misspelt(key)


def _keys(model: type[BaseModel], above: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        key = f"{above}.{name}" if above else name
        yield key, field
        if not above and name in SECTIONS:
            yield from _keys(SECTIONS[name], name)
    if not above:
        for name in ("weight", "on_error", "timeout"):
            yield f"rewards.0.{name}", RewardRef.model_fields[name]


def _misspelt(section: str) -> Iterator[Case]:
    """A key of each section, one letter of it doubled, is answered by the right one."""
    models = {**SECTIONS, "rewards.0": RewardRef}
    name = "timeout" if section == "rewards.0" else list(models[section].model_fields)[-1]
    wrong = name[:2] + name[1:]
    run = _with_needed(f"{section}.{wrong}", 1)
    yield Case(f"{_shown(section)}.{wrong}, which is misspelt", run_file(run), (_shown(section), wrong, name))


def _cases(key: str, field: FieldInfo) -> Iterator[Case]:
    for what, value in _wrong_values(field):
        run = _with_needed(key, value)
        yield Case(f"{_shown(key)} {what}", run_file(run), (_shown(key),))


def _with_needed(key: str, value: Any) -> dict[str, Any]:
    """`RUN` with a wrong value, and with what that key asks for besides."""
    needed = {
        k: v
        for above, more in NEEDED.items()
        if key.startswith(above) and key != above
        for k, v in more.items()
    }
    if key == "data.source":
        needed = NEEDED[key]
    return changed({**needed, key: value})


def _wrong_values(field: FieldInfo) -> Iterator[tuple[str, Any]]:
    """(what is wrong, value) for each mistake that a field of this type allows."""
    annotation = field.annotation
    members = get_args(annotation) if type(None) in get_args(annotation) else (annotation,)
    origins = [get_origin(member) for member in members]
    if {int, float} & set(members):
        yield "that is text", "much"
        yield "that is true", True
        yield "that is infinite", math.inf
        yield from _out_of_bounds(field)
        if float not in members:
            yield "that is a fraction", 1.5
    elif bool in members:
        yield "that is no truth value", "perhaps"
        yield "that is the number 2", 2
    elif Literal in origins:
        yield "that is another word", "sometimes"
        yield "that is a list", LIST
    elif any(_is(member, ComponentRef) for member in members):
        yield "that is a number", 7
        yield "that no plugin offers", "no-such-thing"
        yield "without a name", {"weight": 1}
        yield "with a name and a path", {"name": "a", "path": "b.py:c"}
        yield "in a file that is not there", {"path": "absent.py:Thing"}
    elif any(_is(member, Section) for member in members):
        yield "that is text", "much"
        yield "that is a list", LIST
    elif list in origins:
        yield "that is text", "much"
        yield "with a mapping in it", [{"value": 1}]
    elif dict in origins:
        yield "that is text", "much"
        yield "that is a list", LIST
    elif str in members:
        yield "that is a number", 17
        yield "that is a mapping", {"value": 1}


def _out_of_bounds(field: FieldInfo) -> Iterator[tuple[str, Any]]:
    for bound in field.metadata:
        for name, beyond in (("gt", 0), ("ge", -1), ("lt", 0), ("le", 1)):
            limit = getattr(bound, name, None)
            if limit is not None:
                yield f"that is out of its bound ({name} {limit})", limit + beyond


def _is(member: Any, model: type) -> bool:
    return isinstance(member, type) and issubclass(member, model)


def _shown(key: str) -> str:
    return key.replace("rewards.0", "rewards[0]")


def _parameter_cases() -> Iterator[Case]:
    """Parameters of the components that come with grpox."""
    registry = Registry(discover(()))
    for offer in registry.plugins.offers:
        if offer.distribution != "grpox" or offer.kind not in PLACES:
            continue
        model, key = registry.config_model(offer), PLACES[offer.kind]
        for name, field in fields_by_key(model).items() if model else ():
            # Their types are told as those of the sections are: here it is enough that each is looked at.
            for what, value in (*itertools.islice(_wrong_values(field), 1), *_out_of_bounds(field)):
                run = changed({key: {"name": offer.spec.name, name: value}})
                shown = f"{_shown(key)}.{name}"
                yield Case(f"{shown} of {offer.spec.name} {what}", run_file(run), (shown,))
        run = changed({key: {"name": offer.spec.name, "no_such": 1}})
        yield Case(f"{_shown(key)} {offer.spec.name} with a strange parameter", run_file(run), ("no_such",))
