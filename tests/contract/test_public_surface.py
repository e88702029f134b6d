"""The plugin API is what public_surface.txt says: it changes on purpose, and never unnoticed."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pluggy

import grpox
import grpox.environments
import grpox.errors.validation
import grpox.runtime.child
import grpox.runtime.logs
import grpox.testing
from grpox import contracts, toolkit
from grpox.plugins import hookspecs
from grpox.testing import pytest_plugin

SNAPSHOT = Path(__file__).with_name("public_surface.txt")

ADVICE = f"""
The public surface is not what {SNAPSHOT.name} says (- as it was, + as it is).
If that was not meant, undo it. If it was:

1. Only new names, each with a default: plugins that exist work on. API_VERSION stays.
2. A name is renamed or goes: keep the old one, with a warning (docs/plugin-api.md, "How something changes").
3. A deprecated name goes after its minor version, or something changes in a way that breaks plugins: raise
   API_VERSION.

Then write the snapshot anew, and commit it with the change:

    python tests/contract/test_public_surface.py
"""


def surface() -> Iterator[str]:
    """All that plugins may rely on, a line each."""
    yield f"API_VERSION = {hookspecs.API_VERSION}"
    yield f"entry-point group {hookspecs.ENTRY_POINT_GROUP}"
    yield from (f"kind {kind}: {hook}" for kind, hook in hookspecs.KINDS.items())
    yield from hooks()
    for name in sorted(grpox.__all__):
        found = getattr(grpox, name)
        described = inspect.isfunction(found) or found in (hookspecs.CommandSpec, hookspecs.ComponentSpec)
        yield from members(f"grpox.{name}", found) if described else [f"grpox.{name}"]
    for name, found in sorted(vars(contracts).items()):
        if is_contract(name, found):
            yield from members(f"grpox.contracts.{name}", found)
    for name in sorted(grpox.environments.__all__):
        yield from members(f"grpox.environments.{name}", getattr(grpox.environments, name))
    yield from (f"grpox.config.{name}" for name in PUBLIC_CONFIG if hasattr(grpox.config, name))
    for name in PUBLIC_ERRORS:
        yield from members(f"grpox.errors.{name}", getattr(grpox.errors, name))
    for name in sorted(toolkit.__all__):
        yield from members(f"grpox.toolkit.{name}", getattr(toolkit, name))
    yield from members("grpox.errors.validation.problems_of", grpox.errors.validation.problems_of)
    for module, names in PUBLIC_RUNTIME.items():
        for name in names:
            yield from members(f"{module.__name__}.{name}", getattr(module, name))
    for name in sorted(grpox.testing.__all__):
        yield from public_testing(name, getattr(grpox.testing, name))
    for name in sorted(vars(pytest_plugin)):
        if name.startswith("grpox_"):
            yield f"pytest fixture {name}"


def hooks() -> Iterator[str]:
    manager = pluggy.PluginManager("grpox")
    manager.add_hookspecs(hookspecs)
    for name, caller in sorted(vars(manager.hook).items()):
        if isinstance(caller, pluggy.HookCaller) and caller.spec is not None:
            old = ", ".join(caller.spec.warn_on_impl_args or ())
            deprecated = " deprecated" if caller.spec.warn_on_impl else f" deprecated: {old}" if old else ""
            yield f"hook {name}{signature(caller.spec.function)}{deprecated}"


def is_contract(name: str, found: object) -> bool:
    """Classes of grpox.contracts, and its names for types; not what it imports."""
    if name.startswith("_") or inspect.ismodule(found):
        return False
    module = getattr(found, "__module__", "")
    return module == contracts.__name__ if inspect.isclass(found) else name in ALIASES


ALIASES = (
    "CachePath", "TokenizerPath", "InputPath", "Message", "ModelPath", "Scores", "Text", "WeightStream",
    "completion_text",
)  # fmt: skip
PUBLIC_CONFIG = ("Parameters", "RunConfig", "SamplingConfig")
PUBLIC_RUNTIME = {
    grpox.runtime.child: (
        "Child", "ChildCut", "ChildEnded", "ChildFailed", "ChildLate", "Restarted", "connect_to_parent",
    ),
    grpox.runtime.logs: ("WarnOnce", "get_logger", "show_logs"),
}  # fmt: skip
PUBLIC_ERRORS = (
    "ConfigError", "GrpoxError", "Problem", "RunClosed", "RunFailed", "nearest", "redact", "redacted",
)  # fmt: skip


def members(name: str, found: Any) -> Iterator[str]:
    """A class with its fields or members and its methods; of anything else the name alone."""
    if not inspect.isclass(found):
        yield name + (signature(found) if inspect.isfunction(found) else "")
        return
    yield f"{name}{' protocol' if getattr(found, '_is_protocol', False) else ''}"
    if issubclass(found, enum.Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in found)
    elif dataclasses.is_dataclass(found):
        yield from (f"{name}.{field.name}: {field.type}{default(field)}" for field in dataclasses.fields(found))
    else:
        annotations = inspect.get_annotations(found)
        yield from (f"{name}.{field}: {annotation}" for field, annotation in annotations.items())
    for method, function in vars(found).items():
        own = inspect.isfunction(function) and function.__module__ == found.__module__
        if own and (not method.startswith("_") or method == "__call__"):
            yield f"{name}.{method}{signature(function)}"
        elif isinstance(function, property):  # also a field's old name
            yield f"{name}.{method} property"


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    factory = field.default_factory
    return "" if factory is dataclasses.MISSING else f" = {factory.__name__}()"  # type: ignore[attr-defined]


def public_testing(name: str, found: Any) -> Iterator[str]:
    """A suite with the attributes that its subclasses set, a function with its arguments."""
    if not inspect.isclass(found):
        yield f"grpox.testing.{name}{signature(found)}"
        return
    yield f"grpox.testing.{name}"
    for attribute, annotation in inspect.get_annotations(found).items():
        if not attribute.startswith("_"):
            yield f"grpox.testing.{name}.{attribute}: {annotation}"
    if issubclass(found, Exception):
        yield f"grpox.testing.{name}{signature(found.__init__)}"


class Raw(str):
    """An annotation as it stands in the source: without the quotes of its repr."""

    __repr__ = str.__str__


def signature(function: Any) -> str:
    """As the source has it, whatever the version of Python."""
    found = inspect.signature(function)
    empty = inspect.Parameter.empty
    parameters = [
        each if each.annotation is empty else each.replace(annotation=Raw(each.annotation))
        for each in found.parameters.values()
    ]
    returns = found.return_annotation
    return str(
        found.replace(parameters=parameters, return_annotation=returns if returns is empty else Raw(returns))
    )


def test_the_public_surface_is_the_one_that_was_committed() -> None:
    was = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changed = difflib.unified_diff(was, list(surface()), lineterm="", n=0)
    lines = [line for line in changed if not line.startswith(("---", "+++", "@@"))]
    assert not lines, "\n".join([*lines, ADVICE])


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join([*surface(), ""]), encoding="utf-8")
