"""Imports one plugin and calls its discovery hooks, giving components and commands, or the plugin's error.

Each plugin has its own manager, so that an error in one plugin does not affect others.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NoReturn

import pluggy

from grpox.errors import brief, nearest
from grpox.plugins import hookspecs
from grpox.plugins.hookspecs import KINDS, CommandSpec, ComponentSpec
from grpox.runtime.signals import raise_if_signal

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
def _watched() -> Iterator[None]:
    """Keep what a block prints, and stop it from ending the process; raises Misbehaved for both."""
    own, end, faults, text = os.getpid(), os._exit, list[str](), io.StringIO()

    def refuse(code: int) -> NoReturn:
        if os.getpid() != own:  # a child that the plugin forked
            end(code)
        faults.append(f"calls os._exit({code})")
        raise Misbehaved(faults[0])

    def swap(descriptor: int) -> None:
        for stream in filter(None, (sys.stdout, sys.__stdout__)):
            with suppress(OSError, ValueError):
                stream.flush()
        os.dup2(descriptor, 1)
        os._exit = refuse if descriptor == memory else end  # type: ignore[assignment]

    # Without standard output the new file takes its number.
    memory, before = os.memfd_create("printed"), os.dup(1)
    try:
        swap(memory)
        with redirect_stdout(text):
            yield
    finally:
        swap(before)
        printed = text.getvalue() or os.pread(memory, 100, 0).decode(errors="replace")
        os.close(before)
        os.close(memory)
        if printed:
            faults.append(f"prints {brief(printed)}")
        if faults:
            raise Misbehaved(f"{faults[0]} as it is imported")


@dataclass(frozen=True)
class Loaded:
    """Content of a plugin; for a broken plugin, only its error."""

    plugin: Any = None
    components: tuple[tuple[str, ComponentSpec], ...] = ()
    """Pairs (kind, component)."""
    commands: tuple[CommandSpec, ...] = ()
    observes: tuple[str, ...] = ()
    """Lifecycle hooks that the module itself implements, called in every run."""
    error: BaseException | None = None
    """Reason why the module is not a plugin."""


def load(entry_point: metadata.EntryPoint) -> Loaded:
    """Import a plugin, check its hooks, and collect its components and commands: all of them or none.

    No plugin can make this function raise; only a signal can.
    """
    try:
        with _watched():
            plugin = entry_point.load()
            alone = check_hooks(plugin)
            callers = alone.get_hookcallers(plugin) or ()
            own = (*KINDS.values(), COMMANDS)
            observes = sorted(caller.name for caller in callers if caller.name not in own)
            commands = tuple(_offered(alone, COMMANDS))
            components = tuple((kind, spec) for kind, hook in KINDS.items() for spec in _offered(alone, hook))
        return Loaded(plugin, components, commands, tuple(observes))
    except BaseException as error:  # noqa: BLE001 - a plugin may raise anything, which is recorded
        raise_if_signal(error)
        return Loaded(error=error)


def new_manager() -> pluggy.PluginManager:
    """Create a manager that knows grpox's hooks and has no plugin."""
    manager = pluggy.PluginManager("grpox")
    manager.add_hookspecs(hookspecs)
    return manager


def _check_offer(spec: object, hook: str) -> Any:
    """Check that a result of a discovery hook is a component with a valid name, or a command.

    Raises:
        InvalidPlugin: the result is neither.
    """
    is_command = hook == COMMANDS
    wanted = CommandSpec if is_command else ComponentSpec
    if not isinstance(spec, wanted):
        raise InvalidPlugin(f"{hook} offers a {type(spec).__name__}, not a {wanted.__name__}")
    names = r"[a-z][a-z0-9-]*" if is_command else r"[^\s:/]+"
    if not re.fullmatch(names, spec.name):
        rule = "a command may contain only lower-case letters, digits and hyphens"
        rule = rule if is_command else "a name may contain no space, ':' or '/'"
        raise InvalidPlugin(f"{hook} offers {spec.name!r}: {rule}")
    for label in ("target", "config"):
        reference = getattr(spec, label, "")
        if not re.fullmatch(r"[\w.]+:[\w.]+", reference) and (reference or label == "target"):
            form = "package.module:name" if is_command else "package.module:Name"
            raise InvalidPlugin(f"{hook}: the {label} of '{spec.name}' is {reference!r}, not '{form}'")
    for label in ("needs", "provides", "requires"):
        strings = getattr(spec, label, ())
        if isinstance(strings, str) or not all(isinstance(each, str) for each in strings):
            raise InvalidPlugin(f"{hook}: {label} of '{spec.name}' is not a tuple of strings, ('a', 'b')")
    return spec


def check_hooks(plugin: Any) -> pluggy.PluginManager:
    """Register a plugin or an observer with a manager of its own; its hooks exist and are marked.

    Raises:
        InvalidPlugin: a hook is unknown, not marked, a wrapper, or names an argument that it does not have.
    """
    manager = new_manager()
    known = [name for name in vars(manager.hook) if name.startswith("grpox_")]
    for name in dir(plugin):
        function = getattr(plugin, name, None) if name.startswith("grpox_") else None
        if not inspect.isroutine(function):
            continue
        if manager.parse_hookimpl_opts(plugin, name) is None:
            advice = "mark it with @grpox.hookimpl" if name in known else _did_you_mean(name, known)
            raise InvalidPlugin(f"function {name} is not a hook implementation; {advice}", function)
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as error:
        # Only pluggy's message names the hook.
        hook = re.search(r"hook '(\w+)'", str(error))
        function = getattr(plugin, hook[1], None) if hook else None
        raise InvalidPlugin(_unknown_argument(function) or str(error), function) from error
    if problem := wrapper_problem(manager, plugin):
        raise InvalidPlugin(*problem)
    for caller in manager.get_hookcallers(plugin) or ():
        required = [each.function for each in caller.get_hookimpls() if not each.optionalhook]
        if not caller.has_spec() and required:
            what = f"there is no hook {caller.name}; {_did_you_mean(caller.name, known)}"
            raise InvalidPlugin(what, required[0])
    return manager


def wrapper_problem(manager: pluggy.PluginManager, plugin: Any) -> tuple[str, Any] | None:
    """Describe the first hook wrapper of a registered plugin, and return its function; None if it has none."""
    for caller in manager.get_hookcallers(plugin) or ():
        for each in caller.get_hookimpls():
            if each.plugin is plugin and (each.wrapper or each.hookwrapper):
                rule = "each implementation is called by itself, so that there is nothing to wrap"
                return f"{caller.name} is a hook wrapper, and {rule}; remove wrapper=True", each.function
    return None


def _unknown_argument(function: Any) -> str:
    """Describe the first argument of a hook's implementation that the hook lacks; empty if there is none."""
    specification = getattr(hookspecs, getattr(function, "__name__", ""), None)
    if specification is None:
        return ""
    known = list(inspect.signature(specification).parameters)
    for name in inspect.signature(function).parameters:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            return f"{function.__name__} has no argument {name!r}{hint} (it has {', '.join(known)})"
    return ""


def _did_you_mean(name: str, known: list[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near}?" if near else f"the hooks are {', '.join(known)}"


def _offered(alone: pluggy.PluginManager, hook: str) -> Iterator[Any]:
    """Call a discovery hook of one plugin only: pluggy's multicall would mix the results of all plugins."""
    names = set()
    for implementation in getattr(alone.hook, hook).get_hookimpls():
        try:
            specs = list(implementation.function())
        except BaseException as error:
            error.add_note(f"in {hook}")
            raise
        for answer in specs:
            spec = _check_offer(answer, hook)
            if spec.name in names:
                raise InvalidPlugin(f"{hook} offers '{spec.name}' twice", implementation.function)
            names.add(spec.name)
            yield spec
