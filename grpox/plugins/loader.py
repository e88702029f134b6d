"""Imports a plugin under watch, checks its hooks, and calls its discovery hooks."""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, NoReturn

import pluggy

from grpox.errors import brief, nearest
from grpox.plugins import hookspecs
from grpox.plugins.hookspecs import CommandSpec, ComponentSpec

COMMANDS = "grpox_commands"


class InvalidPlugin(Exception):
    """Raised if a plugin breaks a rule of the plugin API; its author must correct it.

    Args:
        what: the rule, and the plugin's mistake.
        function: the plugin's function with the mistake, if it is in a function.
    """

    def __init__(self, what: str, function: object = None) -> None:
        super().__init__(what)
        self.function = function


class Misbehaved(InvalidPlugin):
    """Raised if a plugin ends the process or prints as it is imported, which every command refuses."""


@contextmanager
def watched() -> Iterator[None]:
    """Keep what a block prints, and stop it from ending the process; raises Misbehaved for both."""
    # A plugin may keep the stream that it finds, such as a handler of logging; it stays open.
    own, end, faults, text = os.getpid(), os._exit, list[str](), io.StringIO()

    def refuse(code: int) -> NoReturn:
        if os.getpid() != own:  # a child that the plugin forked
            end(code)
        faults.append(f"calls os._exit({code})")
        raise Misbehaved(faults[0])

    # Without standard output the new file takes its number.
    memory, before = os.memfd_create("printed"), os.dup(1)
    _flush()
    os.dup2(memory, 1)
    os._exit = refuse  # type: ignore[assignment]
    try:
        with redirect_stdout(text):
            yield
    finally:
        _flush()
        os._exit = end
        os.dup2(before, 1)
        if printed := text.getvalue() or os.pread(memory, 100, 0).decode(errors="replace"):
            faults.append(f"prints {brief(printed)}")
        os.close(before)
        os.close(memory)
        if faults:
            raise Misbehaved(f"{faults[0]} as it is imported")


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.__stdout__)):
        with suppress(OSError, ValueError):
            stream.flush()


def new_manager() -> pluggy.PluginManager:
    """Create a manager that knows grpox's hooks and has no plugin."""
    manager = pluggy.PluginManager("grpox")
    manager.add_hookspecs(hookspecs)
    return manager


def check_hooks(plugin: Any) -> pluggy.PluginManager:
    """Register a plugin or an observer with a manager of its own; its hooks exist and are marked.

    Raises:
        InvalidPlugin: a hook is unknown, not marked, a wrapper, or names an argument that it does not have.
    """
    manager = new_manager()
    known = [name for name in vars(manager.hook) if name.startswith("grpox_")]
    for name in dir(plugin):
        function = getattr(plugin, name, None) if name.startswith("grpox_") else None
        if inspect.isroutine(function) and manager.parse_hookimpl_opts(plugin, name) is None:
            advice = "mark it with @grpox.hookimpl" if name in known else _did_you_mean(name, known)
            raise InvalidPlugin(f"function {name} is not a hook implementation; {advice}", function)
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as error:
        # Only pluggy's message names the hook.
        hook = re.search(r"hook '(\w+)'", str(error))
        function = getattr(plugin, hook[1], None) if hook else None
        raise InvalidPlugin(_unknown_argument(function) or str(error), function) from error
    for caller in manager.get_hookcallers(plugin) or ():
        for each in caller.get_hookimpls():
            if each.wrapper or each.hookwrapper:
                rule = "each implementation is called by itself, so that there is nothing to wrap"
                what = f"{caller.name} is a hook wrapper, and {rule}; remove wrapper=True"
                raise InvalidPlugin(what, each.function)
            if not caller.has_spec() and not each.optionalhook:
                what = f"there is no hook {caller.name}; {_did_you_mean(caller.name, known)}"
                raise InvalidPlugin(what, each.function)
    return manager


def _unknown_argument(function: Any) -> str:
    """Describe the first argument of a hook's implementation that the hook lacks; empty if there is none."""
    specification = getattr(hookspecs, getattr(function, "__name__", ""), None)
    known = list(inspect.signature(specification).parameters) if specification else []
    unknown = [name for name in inspect.signature(function).parameters if name not in known] if known else []
    if not unknown:
        return ""
    near = nearest(unknown[0], known)
    hint = f"; did you mean {near}?" if near else ""
    return f"{function.__name__} has no argument {unknown[0]!r}{hint} (it has {', '.join(known)})"


def _did_you_mean(name: str, known: list[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near}?" if near else f"the hooks are {', '.join(known)}"


def offered(alone: pluggy.PluginManager, hook: str) -> Iterator[Any]:
    """Yield what a discovery hook of a single plugin offers; the plugin has this manager of its own."""
    names = set()
    for implementation in getattr(alone.hook, hook).get_hookimpls():
        try:
            specs = list(implementation.function())
        except BaseException as error:
            error.add_note(f"in {hook}")
            raise
        for spec in specs:
            _check_offer(spec, hook)
            if spec.name in names:
                raise InvalidPlugin(f"{hook} offers '{spec.name}' twice", implementation.function)
            names.add(spec.name)
            yield spec


def _check_offer(spec: Any, hook: str) -> None:
    """Check that a result of a discovery hook is a component or a command with a valid name."""
    wanted: type[Any] = ComponentSpec
    names, rule = r"[^\s:/]+", "a name may contain no space, ':' or '/'"
    if hook == COMMANDS:
        rule = "a command may contain only lower-case letters, digits and hyphens"
        wanted, names = CommandSpec, r"[a-z][a-z0-9-]*"
    if not isinstance(spec, wanted):
        raise InvalidPlugin(f"{hook} offers a {type(spec).__name__}, not a {wanted.__name__}")
    if not re.fullmatch(names, spec.name):
        raise InvalidPlugin(f"{hook} offers {spec.name!r}: {rule}")
    for label in ("target", "config"):
        reference = getattr(spec, label, "")
        if not re.fullmatch(r"[\w.]+:[\w.]+", reference) and (reference or label == "target"):
            what = f"the {label} of '{spec.name}' is {reference!r}, not 'package.module:Name'"
            raise InvalidPlugin(f"{hook}: {what}")
    for label in ("needs", "provides", "requires"):
        strings = getattr(spec, label, ())
        if isinstance(strings, str) or not all(isinstance(each, str) for each in strings):
            raise InvalidPlugin(f"{hook}: {label} of '{spec.name}' is not a tuple of strings, ('a', 'b')")
