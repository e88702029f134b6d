"""What the files of a run say of how far it came: status, end, error, newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpox.checkpoint.folders import checkpoints_in
from grpox.observing.early_stop import told as early_stop_told
from grpox_mlflow.naming import TAG_LENGTH

CHECKPOINT, ERROR, STOPPED_EARLY = "grpox.checkpoint", "grpox.error", "grpox.stopped_early"
_INTERRUPTIONS = ("KeyboardInterrupt", "Terminated", "SystemExit")


def ending(folder: Path) -> tuple[str, int]:
    """(MLflow's status, unix milliseconds) of a run that is over.

    FINISHED with a summary; FAILED or, where a signal ended it, KILLED with a failure; KILLED with neither,
    since it had no time to say anything.
    """
    if (folder / "summary.json").exists():
        return "FINISHED", _modified(folder / "summary.json")
    error = _json(folder / "failure.json").get("error")
    if error is not None:
        killed = str(error).startswith(_INTERRUPTIONS)
        return "KILLED" if killed else "FAILED", _modified(folder / "failure.json")
    last = next(path for path in (folder / "metrics.jsonl", folder / "mlflow.json", folder) if path.exists())
    return "KILLED", _modified(last)


def tags_of(folder: Path) -> dict[str, str]:
    """Tags that follow from a run's files as they are now."""
    tags = {}
    summary = _json(folder / "summary.json")
    if isinstance(stopped := summary.get("stopped_early"), dict):
        tags[STOPPED_EARLY] = early_stop_told(stopped)[:TAG_LENGTH]
    newest = summary.get("model") or next(iter(checkpoints_in(folder)), None)
    if newest is not None:
        tags[CHECKPOINT] = str(newest)[:TAG_LENGTH]
    error = _json(folder / "failure.json").get("error")
    if error is not None:
        tags[ERROR] = str(error)[:TAG_LENGTH]
    return tags


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000
