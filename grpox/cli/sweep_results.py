"""Results of a sweep's runs, read from their folders and drawn as a table."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rich.table import Table
from rich.text import Text

from grpox.cli.sweep_grid import SEED
from grpox.contracts import SweepResults
from grpox.errors.console import folding_table
from grpox.errors.formatting import duration
from grpox.observing.record_files import MetricsLine
from grpox.runtime.files import open_regular

STYLES = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow", "WAITING": "dim"}


def last_values(folder: Path) -> dict[str, float]:
    """Read the last value of each metric in metrics.jsonl, evaluations under ``evaluation/``, and ``step``."""
    values: dict[str, float] = {}
    for line in lines_of(folder / "metrics.jsonl"):
        with suppress(ValueError):  # a line cut off by a kill
            parsed = MetricsLine.parse(line)
            values |= parsed.named_values | {"step": float(parsed.step)}
    return values


def lines_of(path: Path) -> list[str]:
    """Read the lines of a run's file; none if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def as_table(results: SweepResults, names: Mapping[str, str]) -> Table:
    """Draw a table for the terminal; the best run is marked.

    Args:
        names: key of an axis -> heading.
    """
    table = folding_table("", *names.values())
    table.add_column("status", no_wrap=True)
    for heading in (results.metric, "steps", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("folder", overflow="fold")
    best = results.best
    for result in results.runs:
        table.add_row(
            "*" if result is best else "",
            *(Text(result.setting[key]) for key in names),
            Text(result.status, STYLES[result.status]),
            "" if result.value is None else f"{result.value:.4g}",
            str(result.steps),
            "" if result.seconds is None else duration(result.seconds),
            Text(result.folder),
            style="bold" if result is best else "",
        )
    return table


def conclusions(results: SweepResults) -> Iterator[str]:
    """Yield the lines below the table: statistics over seeds, the best run, and the failed ones.

    For each setting with several seeds, a line has the metric's mean and standard deviation over the seeds.
    """
    groups = defaultdict[str, list[float]](list)
    for result in results.finished:
        if SEED in result.setting and result.value is not None:
            setting = [f"{key}={value}" for key, value in result.setting.items() if key != SEED]
            groups[f"{', '.join(setting)}: " if setting else ""].append(result.value)
    for where, values in groups.items():
        if len(values) > 1:
            mean, spread = statistics.mean(values), statistics.stdev(values)
            yield f"{where}{results.metric} {mean:.4g} +- {spread:.2g} over {len(values)} seeds"
    if best := results.best:
        yield f"best: {best.name}, {results.metric} {best.value:.4g}"
    for result in results.runs:
        if result.status == "FAILED":
            yield f"failed: {result.name}: {result.error or 'see its log'}\n    {result.folder}.log"
