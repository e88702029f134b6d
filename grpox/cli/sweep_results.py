"""What the runs of a sweep came to: read from their folders, kept in ``sweep.json``, and as a table."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpox.cli.sweep_children import Child
from grpox.cli.sweep_grid import SEED
from grpox.contracts import SweepResults, SweptRun
from grpox.runtime.files import write_whole

if TYPE_CHECKING:
    from rich.table import Table

FILE = "sweep.json"
TAIL = 2**16
"""Bytes of metrics.jsonl that hold several of its lines."""
EVALUATION = "evaluation/"
Status = Literal["FINISHED", "FAILED", "RUNNING", "WAITING", "KILLED"]
FINISHED: Status = "FINISHED"
FAILED: Status = "FAILED"
RUNNING: Status = "RUNNING"
WAITING: Status = "WAITING"
KILLED: Status = "KILLED"
STYLES = {RUNNING: "cyan", FINISHED: "green", FAILED: "red", KILLED: "yellow", WAITING: "dim"}


def write(results: SweepResults, folder: Path) -> None:
    """Write ``sweep.json`` into the sweep's folder, whole or not at all."""
    told = asdict(results) | {"best": results.best.name if results.best else None}
    write_whole(folder / FILE, json.dumps(told, indent=2, ensure_ascii=False) + "\n")


def result_of(
    child: Child, metric: str, status: Status, error: str = "", run_id: str | None = None
) -> SweptRun:
    """Read from a run's folder how it stands.

    Args:
        run_id: the id that a tracker gave it.
    """
    summary = child.summary()
    recorded = last_values(child.folder) if summary is not None or status != WAITING else {}
    value = recorded.get(metric)
    return SweptRun(
        name=child.name,
        setting=dict(child.setting),
        status=FINISHED if summary is not None else status,
        value=value if value is not None and math.isfinite(value) else None,
        steps=int(recorded.get("step", 0)),
        seconds=None if summary is None else summary.get("train_seconds"),
        folder=str(child.folder),
        run_id=run_id,
        error="" if summary is not None else error,
    )


def last_values(folder: Path) -> dict[str, float]:
    """Metric -> its last value in metrics.jsonl, those of evaluations below ``evaluation/``; and ``step``."""
    found: dict[str, float] = {}
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            told: dict[str, Any] = json.loads(line)
            kind, prefix = ("evaluation", EVALUATION) if "evaluation" in told else ("metrics", "")
            values = {prefix + name.removeprefix(prefix): float(told[kind][name]) for name in told[kind]}
            found |= values | {"step": float(told["step"])}
        except (ValueError, TypeError, KeyError):
            continue  # the process was killed while it wrote
    return found


def last_step(folder: Path) -> int:
    """Optimizer steps that a run has taken, by the end of its metrics.jsonl: cheap to ask again and again."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue
    return 0


def as_table(results: SweepResults, names: Mapping[str, str]) -> Table:
    """For a terminal; the best run is marked.

    Args:
        names: key of an axis -> heading.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from grpox.errors.formatting import duration

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", *names.values()):
        table.add_column(heading, overflow="fold")
    for heading in ("status", results.metric, "steps", "time"):
        table.add_column(heading, justify="left" if heading == "status" else "right", no_wrap=True)
    table.add_column("folder", overflow="fold")
    best = results.best
    for result in results.runs:
        style = "bold" if result is best else ""
        cells = [result.setting[key] for key in names]
        table.add_row(
            "*" if result is best else "",
            *(Text(cell) for cell in cells),
            Text(result.status, STYLES[result.status]),
            "" if result.value is None else f"{result.value:.4g}",
            str(result.steps),
            "" if result.seconds is None else duration(result.seconds),
            Text(result.folder),
            style=style,
        )
    return table


def over_seeds(results: SweepResults) -> Iterator[str]:
    """Mean and standard deviation of the metric over the seeds, of each setting that has several of it."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for result in results.runs:
        if SEED in result.setting and result.status == FINISHED and result.value is not None:
            setting = tuple(f"{key}={value}" for key, value in result.setting.items() if key != SEED)
            groups.setdefault(setting, []).append(result.value)
    for setting, values in groups.items():
        if len(values) > 1:
            where = f"{', '.join(setting)}: " if setting else ""
            mean, spread = statistics.mean(values), statistics.stdev(values)
            yield f"{where}{results.metric} {mean:.4g} +- {spread:.2g} over {len(values)} seeds"


def told(results: SweepResults) -> Sequence[str]:
    """What to say below the table: which run is the best, and which failed, with the last line they printed."""
    lines = list(over_seeds(results))
    if best := results.best:
        lines.append(f"best: {best.name}, {results.metric} {best.value:.4g}")
    for result in results.runs:
        if result.status == FAILED:
            lines.append(f"failed: {result.name}: {result.error or 'see its log'}\n    {result.folder}.log")
    return lines
