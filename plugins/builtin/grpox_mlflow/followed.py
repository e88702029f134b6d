"""Which MLflow run follows a run's folder, and all that it takes to create it late."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpox.runtime.files import sync

FILE = "mlflow.json"


@dataclass(frozen=True)
class FollowedRun:
    """``mlflow.json`` in a run's folder. It holds no secret."""

    tracking_uri: str
    """Where the run is kept, without a password."""
    experiment: str
    key: str
    """The MLflow run's tag ``grpox.run``: by it a run is found that was created without our hearing of it."""
    start_time: int
    """Unix milliseconds."""
    run_name: str | None = None
    log_completions: bool = True
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[dict[str, str]] = field(default_factory=list)
    """What it reads: see `grpox_mlflow.datasets`."""
    registration: dict[str, Any] | None = None
    """As which model its own are registered: see `grpox_mlflow.registry`; None: they are not."""
    traces_done: int = 0
    """Bytes of traces.jsonl that this store has."""
    experiment_id: str | None = None
    run_id: str | None = None
    """None until the run is created."""

    def write(self, folder: Path) -> None:
        """Keep it in the run's folder, whole or not at all."""
        unfinished = folder / f"{FILE}.unfinished"
        unfinished.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        sync(unfinished)  # a resumed run that found it empty would begin another in MLflow
        unfinished.replace(folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> FollowedRun | None:
        """That of a run's folder; None where MLflow does not follow it."""
        try:
            return cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
