"""The environments and tools of a run, bound to their names and to the rows that they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpox.config import WhenConfig, labels_of
from grpox.environments import Environment
from grpox.plugins.component import BoundComponent
from grpox.runfile.component_checks import BoundTool, bound_tool

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun

TOOLS_ALONE = "tools"
"""Label of the environment of a run that has only tools."""


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
