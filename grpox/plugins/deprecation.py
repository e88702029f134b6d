"""What a plugin still uses of an older plugin API works on, and its author is told by name what to change.

How a change proceeds is in docs/plugin-api.md. Its means:

- a hook, or an argument of one, keeps its specification in `grpox.plugins.hookspecs`, marked with pluggy's own
  ``warn_on_impl`` or ``warn_on_impl_args``: `renamed_hook`, `renamed_argument`, or a `PluginDeprecation` with
  other words;
- a field of a dataclass in `grpox.contracts` keeps its old name by `renamed_fields`.

`api_problem` and `api_note` say whether a component that was written for one version works with this one.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pluggy

from grpox.plugins import hookspecs

Class = TypeVar("Class", bound=type)


class PluginDeprecation(DeprecationWarning):
    """Something that plugins use changes: one sentence for the author of those that do.

    Args:
        what: what changes, what to use, and when the old goes.
        successor: the hook that takes the place of the hook it is about, which is then called for both.
    """

    def __init__(self, what: str, successor: str = "") -> None:
        super().__init__(what)
        self.successor = successor

    def of(self, author: str) -> PluginDeprecation:
        """The same, told to somebody."""
        return PluginDeprecation(f"{author}: {self}", self.successor)


def renamed_hook(old: str, new: str, until: str) -> PluginDeprecation:
    """For ``warn_on_impl`` of the hook `old`, which grpox `until` drops."""
    return PluginDeprecation(f"hook {old} is now {new}; grpox {until} drops the old name", new)


def renamed_argument(hook: str, old: str, new: str, until: str) -> PluginDeprecation:
    """For the key `old` of ``warn_on_impl_args`` of a hook, which grpox `until` no longer passes."""
    return PluginDeprecation(f"argument {old} of {hook} is now {new}; grpox {until} drops the old name")


class PluginManager(pluggy.PluginManager):
    """pluggy's manager, whose warnings of deprecated hooks and arguments name the author."""

    def __init__(self) -> None:
        super().__init__("grpox")
        self.notes: list[str] = []
        """What authors of the plugins that were registered should change, a sentence each."""

    def register(self, plugin: object, name: str | None = None) -> str | None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            registered = super().register(plugin, name)
        module = plugin.__name__ if inspect.ismodule(plugin) else plugin.__module__
        for warning in caught:
            told = warning.message
            if isinstance(told, PluginDeprecation):
                self.notes.append(f"{told} ({Path(warning.filename).name}:{warning.lineno})")
                told = told.of(author_of(module))
            _show(told, warning.filename, warning.lineno)
        return registered


def _show(warning: Warning | str, filename: str, lineno: int) -> None:
    try:
        warnings.warn_explicit(warning, type(warning), filename, lineno)  # type: ignore[arg-type]
    except Warning:
        # Where a filter makes errors of warnings: what is deprecated is no reason to call a plugin broken.
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn_explicit(warning, type(warning), filename, lineno)  # type: ignore[arg-type]


def renamed_fields(until: str, **names: str) -> Callable[[Class], Class]:
    """Let a dataclass's fields go by their old names too, ``@renamed_fields("0.4", old="new")``.

    Whoever reads an old name, or passes it by keyword, gets a `PluginDeprecation` at that line.

    Args:
        until: the version of grpox that no longer knows the old names.
        **names: old name -> name of the field.
    """

    def decorate(cls: Class) -> Class:
        construct = cls.__init__  # type: ignore[misc]

        @functools.wraps(construct)
        def accept(self: Any, *args: Any, **given: Any) -> None:
            for old in names.keys() & given.keys():
                _tell_caller(cls, old, names[old], until)
                given[names[old]] = given.pop(old)  # dataclasses.replace passes the new one too
            construct(self, *args, **given)

        cls.__init__ = accept  # type: ignore[misc]
        for old, new in names.items():
            setattr(cls, old, _old_name(cls, old, new, until))
        return cls

    return decorate


def _old_name(cls: type, old: str, new: str, until: str) -> property:
    def read(self: object) -> Any:
        _tell_caller(cls, old, new, until)
        return getattr(self, new)

    return property(read)


def _tell_caller(cls: type, old: str, new: str, until: str) -> None:
    """Warn at the line that uses the old name, with the name of the distribution which that line is of."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "dataclasses":  # dataclasses.replace
        frame = frame.f_back
    if frame is None:
        return
    warning = PluginDeprecation(f"field {old} of {cls.__name__} is now {new}; grpox {until} drops the old name")
    code, module = frame.f_code, str(frame.f_globals.get("__name__"))
    warning = warning.of(f"{author_of(module)} in {code.co_qualname}")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(warning, PluginDeprecation, code.co_filename, frame.f_lineno, module, registry)


@functools.cache
def author_of(module: str) -> str:
    """Name and version of the distribution whose plugin is nearest to `module`; else the module's own name.

    It is asked of the entry points, because an editable install does not list its modules.
    """
    from grpox.plugins.hookspecs import ENTRY_POINT_GROUP

    found, most = module, 0
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        shared = _shared(module.split("."), entry_point.module.split("."))
        if shared > most and entry_point.dist is not None:
            found, most = f"{entry_point.dist.name} {entry_point.dist.version}", shared
    return found


def _shared(one: list[str], other: list[str]) -> int:
    """How many leading parts two dotted names share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@contextmanager
def collected() -> Iterator[list[str]]:
    """Every `PluginDeprecation` meanwhile, with its place, whatever filters say; each once."""
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", PluginDeprecation)
        show = warnings.showwarning

        def collect(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any
        ) -> None:
            if not isinstance(message, PluginDeprecation):
                show(message, category, filename, lineno, *rest)
            elif (told := f"{message} ({Path(filename).name}:{lineno})") not in found:
                found.append(told)

        warnings.showwarning = collect  # type: ignore[assignment]
        yield found


def api_problem(api: int) -> str:
    """Why a component that was written for this version cannot be used, and what to do; empty if it can."""
    oldest, newest = hookspecs.SUPPORTED_API[0], hookspecs.SUPPORTED_API[-1]
    if api in hookspecs.SUPPORTED_API:
        return ""
    has = f"has {newest}" + (f" and takes {oldest} and later" if oldest < newest else "")
    remedy = "upgrade grpox" if api > newest else "upgrade the plugin"
    return f"written for plugin API {api}, this grpox {has}: {remedy}"


def api_note(api: int) -> str:
    """What the author of a component that can be used should change; empty for one of the newest version."""
    newest = hookspecs.SUPPORTED_API[-1]
    if api == newest or api not in hookspecs.SUPPORTED_API:
        return ""
    return f"written for plugin API {api}, which a later grpox will drop: its author should move to {newest}"
