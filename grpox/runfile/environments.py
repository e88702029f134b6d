"""The environments and tools of a run: loaded, checked, and bound to their names and to rows of the data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpox.config import WhenConfig, labels_of
from grpox.data.prompts import PromptSet
from grpox.environments import Environment
from grpox.environments.contract import as_function, tool_problem
from grpox.errors import ConfigError, Problem, RunFailed, describe, nearest
from grpox.errors.validation import written
from grpox.plugins.component import BoundComponent
from grpox.plugins.load_object import load_object
from grpox.runfile.data_files import RowCheck
from grpox.runtime.signals import raise_if_signal

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun

TOOLS_ALONE = "tools"
"""Label of the environment of a run that has only tools."""


@dataclass(frozen=True)
class BoundTool:
    """A function that the model may call in every environment of the run."""

    name: str
    """Name for the model."""
    function: Callable[..., Any]
    reference: str
    """``/path/to/file.py:name`` or ``package.module:name``."""
    given: bool = False
    """True if it is an object given in Python."""


@dataclass(frozen=True)
class BoundEnvironment:
    """An environment of a run, and the rows that it is for."""

    label: str
    """Name in metrics and files, different for each environment of the run."""
    component: BoundComponent
    when: WhenConfig | None = None
    """None: all rows."""
    weight: float = 1.0
    """Factor of its own reward."""
    given: bool = False
    """True if its class is an object given in Python."""


def bound_environments(run: ResolvedRun) -> list[BoundEnvironment]:
    """Return the environments of a run, in the order of the run file; none for a run without episodes.

    A run with tools alone has one environment, which does nothing else.
    """
    references = run.config.environments
    if not references and run.config.tools:
        plain = BoundComponent("environment", TOOLS_ALONE, "tools", load=lambda: Environment)
        return [BoundEnvironment(TOOLS_ALONE, plain)]
    labels = labels_of(list(references.values()))
    return [
        BoundEnvironment(label, run.components[key], each.when, each.weight, key in run.given.functions)
        for label, (key, each) in zip(labels, references.items(), strict=True)
    ]


def bound_tools(run: ResolvedRun) -> list[BoundTool]:
    """Return the tools of a run, in the order of the run file; a file is executed once per process."""
    functions = run.given.functions
    return [bound_tool(f"tools[{place}]", each, functions) for place, each in enumerate(run.config.tools)]


def bound_tool(key: str, reference: str, given: Mapping[str, Callable[..., Any]]) -> BoundTool:
    """Load a tool and check that the model can be told of it."""
    try:
        loaded = given[key] if key in given else _load_function(reference)
    except ConfigError as error:
        raise ConfigError([replace(problem, key=key) for problem in error.problems]) from error
    function, name = as_function(loaded), reference.rpartition(":")[2]
    if key in given or hasattr(loaded, "__name__"):  # another object has no name of its own
        name = str(getattr(function, "__name__", type(function).__name__))
    if problem := tool_problem(function, name):
        raise ConfigError(f"tool '{name}' {problem}", key, given=reference)
    return BoundTool(name, function, reference, key in given)


def _load_function(reference: str) -> Any:
    """Load ``file.py:name`` or ``package.module:name``."""
    module, _, name = reference.rpartition(":")
    if module.endswith(".py"):
        return load_object(reference)
    if not module or not name:
        allowed = "file.py:name or package.module:name"
        raise ConfigError("does not name a function", given=reference, allowed=allowed)
    try:
        loaded = importlib.import_module(module)
    except BaseException as error:
        raise_if_signal(error)
        what, file = f"{module} cannot be imported: {describe(error)}", f"{module.replace('.', '/')}.py"
        if isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name)):
            what = f"there is no module {error.name}; a file is named with its ending, {file}:{name}"
        raise ConfigError(what, given=reference) from error
    if not hasattr(loaded, name):
        names = [known for known in vars(loaded) if not known.startswith("_")]
        raise ConfigError(f"{module} has no '{name}'", given=reference, nearest=nearest(name, names))
    return getattr(loaded, name)


class EnvironmentOfRow:
    """Finds the environment of a prompt by its row; all rows of a dataset are checked at once.

    Raises:
        ConfigError: a column that tells the rows apart is missing, or a row belongs to no environment or to
            several; the message names the row.
    """

    def __init__(self, whens: Sequence[WhenConfig | None], prompts: PromptSet) -> None:
        self._whens = whens
        self._prompts = prompts
        names = prompts.column_names
        if problems := [*missing_columns(whens, names, prompts.data)]:
            raise ConfigError(problems)
        self._places: list[int] | None = None
        if prompts.stream is None:
            columns = {each.column: prompts.column(each.column) for each in whens if each is not None}
            rows = zip(*columns.values(), strict=True) if columns else ((),) * len(prompts)
            self._places = [
                self._place(index, dict(zip(columns, row, strict=True))) for index, row in enumerate(rows)
            ]

    def __call__(self, row: int) -> int:
        """Return the place of the row's environment in the run's list.

        Raises:
            RunFailed: a row of a stream belongs to no environment, or to several.
        """
        if self._places is not None:
            return self._places[row]
        _, columns = self._prompts.rows([row])
        try:
            return self._place(row, {name: values[0] for name, values in columns.items()})
        except ConfigError as error:
            raise RunFailed(str(error.problems[0])) from error

    def _place(self, index: int, row: Mapping[str, Any]) -> int:
        places = _matching(row, self._whens)
        if len(places) != 1 and (problem := misfit(row, self._whens, self._prompts.place(index))):
            raise ConfigError(problem)
        return places[0]


def misfit(row: Mapping[str, Any], whens: Sequence[WhenConfig | None], place: str) -> Problem | None:
    """Return the problem with a row of the data that belongs to no environment, or to several.

    Args:
        place: the row in words, for the message.
    """
    places = _matching(row, whens)
    if len(places) == 1:
        return None
    columns = list(dict.fromkeys(when.column for when in whens if when is not None))
    wanted = [f"{when.column} is {written(when.equals)}" for when in whens if when is not None]
    given = ", ".join(f"{name} {_typed(row.get(name))}" for name in columns)
    what = f"{place} belongs to no environment"
    if places:
        what = f"{place} belongs to {' and '.join(key_of(place, whens) for place in places)}; a row has one"
    near = nearest(given, [f"{when.column} {_typed(when.equals)}" for when in whens if when is not None])
    near = near if not places and near != given else ""
    return Problem(what, "environment", given=given, allowed="; ".join(wanted), nearest=near)


def _matching(row: Mapping[str, Any], whens: Sequence[WhenConfig | None]) -> list[int]:
    return [
        place for place, when in enumerate(whens) if when is None or equal(row.get(when.column), when.equals)
    ]


def equal(value: Any, wanted: Any) -> bool:
    """Compare as YAML does: true is not 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _typed(value: Any) -> str:
    """Write a value so that text and number differ: ``'1'`` and ``1``."""
    return repr(value) if isinstance(value, str) else written(value)


def key_of(place: int, whens: Sequence[object]) -> str:
    return f"environment[{place}]" if len(whens) > 1 else "environment"


def missing_columns(whens: Sequence[WhenConfig | None], columns: Sequence[str], data: str) -> Iterator[Problem]:
    for place, when in enumerate(whens):
        if when is not None and when.column not in columns:
            near, names = nearest(when.column, columns), ", ".join(columns) or "no column beside the prompt"
            key = f"{key_of(place, whens)}.when.column"
            yield Problem(f"no such column in {data}", key, given=when.column, allowed=names, nearest=near)


def row_check(whens: Sequence[WhenConfig | None]) -> RowCheck | None:
    """Return the check of the rows of a file; None if every row has the run's only environment.

    It is also None for several environments of which one names no rows, which is a mistake of its own.
    """
    if None in whens:
        return None
    columns = {when.column for when in whens if when is not None}
    return RowCheck(columns, lambda row, place: misfit(row, whens, place)) if columns else None
