"""Databases for MLflow, each a copy of one that MLflow made once a session, as it runs dozens of migrations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from grpox.contracts import RunContext, ScoredRollout
from grpox.observing.record import LocalRecord
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.tracker import MlflowTracker
from support.session import locked


def migrated_store(folder: Path, name: str = "mlflow.db") -> Path:
    """Put a database without experiments, runs and models into `folder`, and return its path.

    MLflow adds the default experiment when it first opens the copy, so that artifacts lie beside the copy.
    """
    with locked("mlflow-store") as session:
        template = session / "mlflow.db"
        if not template.exists():
            unfinished = template.with_suffix(".new")
            _make(unfinished)
            unfinished.rename(template)
    return Path(shutil.copyfile(template, folder / name))


def _make(path: Path) -> None:
    """Have MLflow make the tables of a new database."""
    # Its import takes seconds, and one process of a session needs it.
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(f"sqlite:///{path}")
    _initialize_tables(engine)
    engine.dispose()


class TrackedRun:
    """A run's record and its tracker, as a training drives them, and what the store has of the run."""

    def __init__(self, run: RunContext, store: str, **config: Any) -> None:
        from mlflow import MlflowClient

        self.run, self.store, self.client = run, store, MlflowClient(store)
        self.config = MlflowConfig(tracking_uri=store, **config)

    def start(self, **context: Any) -> Self:
        """Begin the run with the changes `context`, also after it has failed."""
        self.run = replace(self.run, **context)
        self.record, self.tracker = LocalRecord(MlflowTracker.files), MlflowTracker(self.config)
        self.record.grpox_run_started(self.run)
        self.tracker.grpox_run_started(self.run)
        return self

    def score(self, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        self.record.grpox_rollouts_scored(step, rollouts)
        self.tracker.grpox_rollouts_scored(step, rollouts)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.record.grpox_step_finished(step, metrics)
        self.tracker.grpox_step_finished(metrics)

    def evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self.record.grpox_evaluated(step, metrics)
        self.tracker.grpox_evaluated()

    def fail(self, error: BaseException) -> None:
        self.record.grpox_run_failed(self.run, error)
        self.tracker.grpox_run_failed(error)

    def finish(self, steps: int = 2) -> None:
        (self.run.output_dir / "summary.json").write_text(json.dumps({"steps": steps}))
        (self.run.output_dir / "report.html").write_text(f"<p>{steps} steps")
        self.tracker.grpox_run_finished()

    @property
    def stored(self) -> Any:
        return self.client.get_run(json.loads((self.run.output_dir / "mlflow.json").read_text())["run_id"])

    def values(self, name: str) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(self.stored.info.run_id, name)
        return [(metric.step, metric.value) for metric in history]

    def artifact(self, path: str) -> Path:
        fetched = self.run.output_dir.with_name("fetched")
        fetched.mkdir(exist_ok=True)
        return Path(self.client.download_artifacts(self.stored.info.run_id, path, str(fetched)))
