"""Results of a sweep's runs, read from their folders and drawn as a table."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpox.cli.sweep_grid import SEED
from grpox.contracts import SweepResults
from grpox.observing.record_files import MetricsLine
from grpox.runtime.files import open_regular

if TYPE_CHECKING:
    from rich.table import Table

TAIL = 2**16
"""Number of bytes of metrics.jsonl that hold several lines."""
STYLES = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow", "WAITING": "dim"}


def last_values(folder: Path) -> dict[str, float]:
    """Read the last value of each metric in metrics.jsonl, evaluations under ``evaluation/``, and ``step``."""
    values: dict[str, float] = {}
    for line in tail_lines(folder / "metrics.jsonl", sys.maxsize):
        values |= _values(line)
    return values


def last_step(folder: Path) -> int:
    """Count the optimizer steps of a run from the end of its metrics.jsonl, which is cheap to repeat."""
    lines = reversed(tail_lines(folder / "metrics.jsonl", TAIL))
    return int(next((values["step"] for values in map(_values, lines) if values), 0))


def tail_lines(path: Path, size: int) -> list[str]:
    """Read the lines in the last `size` bytes of a file; none if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _values(line: str) -> dict[str, float]:
    """Parse a line of metrics.jsonl; a line cut off by a kill has no values."""
    try:
        parsed = MetricsLine.parse(line)
    except ValueError:
        return {}
    return parsed.named_values | {"step": float(parsed.step)}


def as_table(results: SweepResults, names: Mapping[str, str]) -> Table:
    """Draw a table for the terminal; the best run is marked.

    Args:
        names: key of an axis -> heading.
    """
    from rich.text import Text

    from grpox.errors.console import folding_table
    from grpox.errors.formatting import duration

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


def over_seeds(results: SweepResults) -> Iterator[str]:
    """Yield mean and standard deviation of the metric over the seeds, for each setting with several seeds."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for result in results.finished:
        if SEED in result.setting and result.value is not None:
            setting = tuple(f"{key}={value}" for key, value in result.setting.items() if key != SEED)
            groups.setdefault(setting, []).append(result.value)
    for setting, values in groups.items():
        if len(values) > 1:
            where = f"{', '.join(setting)}: " if setting else ""
            mean, spread = statistics.mean(values), statistics.stdev(values)
            yield f"{where}{results.metric} {mean:.4g} +- {spread:.2g} over {len(values)} seeds"


def conclusions(results: SweepResults) -> Iterator[str]:
    """Yield the lines below the table: the best run, and the failed ones with the last line of their log."""
    yield from over_seeds(results)
    if best := results.best:
        yield f"best: {best.name}, {results.metric} {best.value:.4g}"
    for result in results.runs:
        if result.status == "FAILED":
            yield f"failed: {result.name}: {result.error or 'see its log'}\n    {result.folder}.log"
