"""Reads what a run has left in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHORT = ("evaluation=null", "tracking={}")
"""Settings of most runs of tests: no evaluation, no tracking."""


def metrics_of(run: Path, kind: str = "metrics") -> list[dict[str, Any]]:
    """Return the metrics of each step, or with `kind` "evaluation" those of each evaluation."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[kind] for line in lines if kind in line]


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def completions_of(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the record of each completion that was sampled for a step."""
    from pyarrow import parquet

    file = run / "completions" / f"step_{step:06d}.parquet"
    rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    return rows
