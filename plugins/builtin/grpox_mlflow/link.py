"""The MLflow run that belongs to a run's folder: the data to create it late, and the progress of shipping."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from grpox.errors import ConfigError, redact, redacted
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
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.naming import CHANGED, FOLDER_TAG, PARENT_TAG, TAG_LENGTH, MlflowNames, shortened

FILE = "mlflow.json"

CHECKPOINT, ERROR, STOPPED_EARLY = "grpox.checkpoint", "grpox.error", "grpox.stopped_early"
ALARM = "grpox.alarm."
"""Beginning of the tags of alarms, which their names follow."""
_INTERRUPTIONS = ("KeyboardInterrupt", "Terminated", "SystemExit")


@dataclass(frozen=True)
class RunLink:
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

    @classmethod
    def begin(
        cls,
        folder: Path,
        uri: str,
        config: MlflowConfig,
        run_name: str,
        params: Iterable[tuple[str, str]],
        tags: Mapping[str, str],
        started: float | None = None,
        resumed: str | None = "",
        **others: Any,
    ) -> RunLink:
        """Write the record of a run, which continues the MLflow run of the record before it in the same store.

        Args:
            uri: address of the store, with its password.
            params: names and full values; those that changed since the record before become tags.
            started: Unix time at which the run began; default: now.
            resumed: text about the time of the changes: `` after step 3``; None begins a new MLflow run.
            others: further fields.
        """
        names = MlflowNames()
        shown: dict[str, str] = redacted({FOLDER_TAG: str(folder), **tags, **config.tags})
        link = cls(
            tracking_uri=redact(uri),
            experiment=config.experiment,
            key=uuid.uuid4().hex,
            start_time=int((time.time() if started is None else started) * 1000),
            run_name=redact(run_name),
            log_completions=config.log_completions,
            params={names[key]: shortened(value) for key, value in params},
            tags={key: value[:TAG_LENGTH] for key, value in shown.items()},
            **others,
        )
        before = None if resumed is None else cls.read(folder)
        if before is not None and before.tracking_uri == link.tracking_uri:
            # MLflow's own parameters cannot change.
            old, new = before.params, link.params
            changes = {
                names[CHANGED + key]: f"{old.get(key)} -> {new.get(key)}{resumed}"[:TAG_LENGTH]
                for key in old | new
                if old.get(key) != new.get(key)
            }
            lasting = {tag: text for tag, text in before.tags.items() if tag.startswith((CHANGED, PARENT_TAG))}
            link = replace(
                before,
                log_completions=link.log_completions,
                tags={**lasting, **link.tags, **changes},
                datasets=link.datasets,
                registration=link.registration,
            )
        link.write(folder)
        return link

    @classmethod
    def read(cls, folder: Path) -> RunLink | None:
        """Read the record in a run's folder; None if MLflow does not track the run."""
        try:
            link = TypeAdapter(cls).validate_json(read_small(folder / FILE))
            return link if 0 <= link.start_time < 1e14 else None
        except (OSError, ValueError):
            return None

    def write(self, folder: Path) -> None:
        """Write the record into the run's folder, atomically."""
        with atomic_path(folder / FILE) as unfinished:
            text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
            unfinished.write_text(text, encoding="utf-8")
            flush_to_disk(unfinished)  # if empty, a resumed run would begin another in MLflow

    def address(self) -> str:
        """Return the address of the store, with the password from the environment, which the record omits."""
        configured = os.environ.get("MLFLOW_TRACKING_URI", "")
        if MASK not in self.tracking_uri:
            return self.tracking_uri
        if redact(configured) == self.tracking_uri:
            return configured
        what = f"the password of the run's store {self.tracking_uri} is unknown, because it is never saved"
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
