"""The MLflow run that belongs to a run's folder: the data to create it late, and the progress of shipping."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from grpox.errors import ConfigError, redact
from grpox.toolkit import (
    MASK,
    alarms_in,
    atomic_path,
    checkpoints_in,
    describe_alarm,
    describe_early_stop,
    flush_to_disk,
    read_mapping,
    read_small,
)
from grpox_mlflow.naming import CHANGED, PARENT_TAG, TAG_LENGTH, Names, changes, shortened

FILE = "mlflow.json"

CHECKPOINT, ERROR, STOPPED_EARLY = "grpox.checkpoint", "grpox.error", "grpox.stopped_early"
ALARM = "grpox.alarm."
"""Beginning of the tags of alarms, which their names follow."""
_INTERRUPTIONS = ("KeyboardInterrupt", "Terminated", "SystemExit")


@dataclass(frozen=True)
class FollowedRun:
    """Content of ``mlflow.json`` in a run's folder. It contains no secret."""

    tracking_uri: str
    """Store of the run, without a password."""
    experiment: str
    key: str
    """The MLflow run's tag ``grpox.run``, by which we find a run whose creation was never confirmed."""
    start_time: int
    """Start in Unix milliseconds."""
    run_name: str | None = None
    log_completions: bool = True
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[dict[str, str]] = field(default_factory=list)
    """Data that the run reads: see `grpox_mlflow.contents`."""
    registration: dict[str, Any] | None = None
    """Registered model for the run's models: see `grpox_mlflow.registry`; None: they are not registered."""
    traces_done: int = 0
    """Bytes of traces.jsonl that this store already has."""
    experiment_id: str | None = None
    run_id: str | None = None
    """MLflow's id of the run; None until the run is created."""

    def write(self, folder: Path) -> None:
        """Write the record into the run's folder, atomically."""
        with atomic_path(folder / FILE) as unfinished:
            text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
            unfinished.write_text(text, encoding="utf-8")
            flush_to_disk(unfinished)  # if empty, a resumed run would begin another in MLflow

    @classmethod
    def begin(
        cls,
        uri: str,
        experiment: str,
        params: Iterable[tuple[str, str]],
        started: float | None = None,
        **others: Any,
    ) -> FollowedRun:
        """Create the record of a new run.

        Args:
            uri: address of the store, with its password.
            params: names and full values.
            started: Unix time at which the run began; default: now.
            others: further fields.
        """
        names = Names()
        return cls(
            tracking_uri=redact(uri),
            experiment=experiment,
            key=uuid.uuid4().hex,
            start_time=int((time.time() if started is None else started) * 1000),
            params={names[key]: shortened(value) for key, value in params},
            **others,
        )

    def resume(self, before: FollowedRun | None, when: str = "") -> FollowedRun:
        """Continue the MLflow run of `before` if it is in the same store; changed parameters become tags."""
        if before is None or before.tracking_uri != self.tracking_uri:
            return self
        tags = {key: value for key, value in before.tags.items() if key.startswith((CHANGED, PARENT_TAG))}
        return replace(
            before,
            log_completions=self.log_completions,
            tags={**tags, **self.tags, **changes(before.params, self.params, when)},
            datasets=self.datasets,
            registration=self.registration,
        )

    @classmethod
    def read(cls, folder: Path) -> FollowedRun | None:
        """Read the record in a run's folder; None if MLflow does not track the run."""
        try:
            followed = TypeAdapter(cls).validate_json(read_small(folder / FILE))
            return followed if 0 <= followed.start_time < 1e14 else None
        except (OSError, ValueError):
            return None


def address_of(followed: FollowedRun) -> str:
    """Return the address of the run's store, with the password from the environment, which the record omits."""
    known = followed.tracking_uri
    if MASK not in known:
        return known
    configured = os.environ.get("MLFLOW_TRACKING_URI", "")
    if redact(configured) == known:
        return configured
    what = f"the password of the run's store {known} is unknown, because it is never saved"
    raise ConfigError(what, "MLFLOW_TRACKING_URI", allowed="this address with its password")


def ending(folder: Path) -> tuple[str, int]:
    """Return (MLflow's status, Unix milliseconds) of a run that has ended.

    A run with a summary is FINISHED. A run with a failure is FAILED, or KILLED if a signal ended it. A run with
    neither is KILLED, because it had no time to record anything.
    """
    error = read_mapping(folder / "failure.json").get("error")
    if (folder / "summary.json").exists():
        status, last = "FINISHED", folder / "summary.json"
    elif error is not None:
        status = "KILLED" if str(error).startswith(_INTERRUPTIONS) else "FAILED"
        last = folder / "failure.json"
    else:
        files = (folder / "metrics.jsonl", folder / FILE, folder)
        status, last = "KILLED", next(path for path in files if path.exists())
    return status, last.stat().st_mtime_ns // 1_000_000


def tags_of(folder: Path) -> dict[str, str]:
    """Return tags that follow from the current files of a run."""
    summary, error = read_mapping(folder / "summary.json"), read_mapping(folder / "failure.json").get("error")
    stopped = summary.get("stopped_early")
    tags = {
        STOPPED_EARLY: describe_early_stop(stopped) if isinstance(stopped, dict) else None,
        CHECKPOINT: summary.get("model") or next(iter(checkpoints_in(folder)), None),
        ERROR: error,
    }
    alarms = alarms_in(summary or read_mapping(folder / "alarms.json"))
    for alarm in alarms:  # several rewards may be dead
        name, text = f"{ALARM}{alarm.get('name')}", describe_alarm(alarm)
        tags[name] = f"{tags[name]}; {text}" if name in tags else text
    return {key: str(value)[:TAG_LENGTH] for key, value in tags.items() if value is not None}
