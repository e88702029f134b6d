"""`grpox plugins check`: runs the conformance suite of a component and draws the results."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from rich.table import Table
from rich.text import Text

from grpox.errors import ConfigError, nearest
from grpox.errors.console import Console
from grpox.plugins.component import kind_of
from grpox.plugins.discovery import Offer
from grpox.plugins.load_object import load_object
from grpox.testing.runner import SUITES, Outcome, outcomes

HEAVY = ("torch", "transformers", "deepspeed", "datasets", "mlflow", "vllm")
"""Modules that take a second or more to import. Every command imports every plugin."""
MARKS = {"passed": "[green]passed[/]", "failed": "[red]FAILED[/]", "skipped": "[yellow]skipped[/]"}


def check_offer(console: Console, offer: Offer, params: Mapping[str, Any]) -> bool:
    """Run the checks of a plugin's component; see `check`."""
    heading = f"[bold]{offer.spec.name}[/]  {offer.kind}, {offer.origin}"
    component = {"name": offer.qualified_name, **params}
    return check(console, offer.kind, component, heading, heavy_imports(offer.module.partition(":")[0]))


def check_path(console: Console, path: str, params: Mapping[str, Any], kind: str | None) -> bool:
    """Run the checks of an object in a file, ``path.py:Name``; see `check`.

    Args:
        kind: kind of the object; None: infer it from its methods.

    Raises:
        ConfigError: the file, object or kind does not exist, or the kind cannot be inferred.
    """
    kind = kind or kind_of(load_object(path))
    if kind not in SUITES:
        what = "no such kind" if kind else "name the kind with --kind: the methods do not show it"
        near = nearest(kind, SUITES) if kind else ""
        raise ConfigError(what, "--kind", given=kind or path, allowed=", ".join(SUITES), nearest=near)
    file, _, name = path.rpartition(":")
    return check(console, kind, {"path": path, **params}, f"[bold]{name}[/]  {kind}, {file}")


def check(
    console: Console, kind: str, component: Mapping[str, Any], heading: str, before: Iterable[Outcome] = ()
) -> bool:
    """Run the suite of a kind, print each outcome after those `before`; return True if none failed.

    Raises:
        ConfigError: the parameters are wrong.
    """
    suite = type("Suite", (SUITES[kind],), {"component": component})()
    suite.bound  # noqa: B018 - wrong parameters are an error of the command, not a failed check
    console.print(heading)
    counts, seconds = Counter[str](), 0.0
    for outcome in chain(before, outcomes(suite)):
        console.print(draw(outcome))
        counts[outcome.status] += 1
        seconds += outcome.seconds
    totals = ", ".join(f"{counts[status]} {status}" for status in MARKS if counts[status])
    console.print(f"{totals} in {seconds:.1f} s", highlight=False)
    return not counts["failed"]


def heavy_imports(module: str) -> Iterator[Outcome]:
    """Import a plugin's module in a new interpreter; yield a failed check if it imports a heavy one."""
    code = f"import sys, {module}; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.stdout.strip() and (heavy := done.stdout.splitlines()[-1].split()):
        title = "the plugin is listed without importing anything heavy"
        what = f"every command imports {module}, and {module} imports {', '.join(heavy)}"
        cure = "move the import to the module of `target`: only runs that select the component import that one"
        yield Outcome("heavy_imports", title, "failed", seconds, what, advice=cure)


def draw(outcome: Outcome) -> Table:
    """Draw one result: mark and title, with the texts below."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=8, justify="right")
    table.add_column(overflow="fold")
    table.add_row(MARKS[outcome.status], Text(outcome.title))
    for text in (outcome.what, outcome.example, outcome.advice):
        if text:
            table.add_row("", Text(text, style="" if outcome.status == "failed" else "dim"))
    return table
