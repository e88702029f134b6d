"""Real MLflow servers: one that all tests share, and others to be killed and stopped. What a run has there."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
import uuid
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import processes, services
from support.mlflow_store import migrated_store
from support.patience import patient
from support.ports import free_port

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


class Server:
    """An MLflow server in a process group of its own, on one port of this machine.

    Args:
        folder: where its database and artifacts are, which stay when it is killed.
        port: where another process has started it; otherwise a free one.
    """

    def __init__(self, folder: Path, port: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: processes.Process | None = None

    def start(self, cold: bool = False) -> int:
        """Start it, wait until it answers, and return the id of its process, which leads its group.

        Args:
            cold: it outlives the process that starts it.
        """
        if not (self.folder / "server.db").exists():
            migrated_store(self.folder, "server.db")
        self._process = processes.start(
            "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(self.port),
            "--backend-store-uri", f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination", str(self.folder / "artifacts"),
            cwd=self.folder, env={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, cold=cold, new_session=True,
        )  # fmt: skip
        try:
            services.wait_until(self.is_healthy, f"{self.uri} answers", 180, self._process)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self._process.output()}") from None
        return self._process.pid

    def is_healthy(self) -> bool:
        """Return whether it says that it is well."""
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=patient(10)) as answer:
                return bool(answer.read() == b"OK")
        except OSError:
            return False

    def assert_unharmed(self) -> None:
        """Write a value and read it back, and leave no trace of that."""
        assert self.is_healthy(), f"{self.uri} is not well"
        client = self.client
        experiment = client.create_experiment(f"unharmed-{uuid.uuid4().hex}")
        run_id = client.create_run(experiment).info.run_id
        client.log_metric(run_id, "loss", 1 / 3, step=7)
        [value] = client.get_metric_history(run_id, "loss")
        assert (value.step, value.value) == (7, 1 / 3)
        client.delete_experiment(experiment)

    def kill(self) -> None:
        """Kill all of its processes with SIGKILL; when this returns, the port is free."""
        if self._process is not None:
            self._send(signal.SIGKILL)
            self._process.wait(10)
            services.wait_until(lambda: not self._is_listening(), f"{self.uri} is free", 10)

    def _is_listening(self) -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    @property
    def client(self) -> MlflowClient:
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    def runs(self, experiment: str) -> list[Run]:
        """Return all runs of an experiment, the newest first; none where there is no such experiment."""
        found = self.client.get_experiment_by_name(experiment)
        return [] if found is None else list(self.client.search_runs([found.experiment_id]))


def shared_server() -> Server:
    """Return the session's server, for tests that do not harm it and name their experiments as no others do."""

    def start(folder: Path) -> services.Facts:
        server = Server(folder)
        return {"pid": server.start(cold=True), "port": server.port, "folder": str(folder)}

    facts = services.shared("mlflow", start)
    return Server(Path(facts["folder"]), facts["port"])


Value = tuple[str, int, int, float | str]
"""Metric, step, unix milliseconds, value: NaN as text, which is equal to itself."""


def history(client: MlflowClient, run: Run) -> Counter[Value]:
    """Return every value that MLflow has of a run, and how often."""
    return Counter(
        (name, metric.step, metric.timestamp, _comparable(metric.value))
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    )


def recorded_values(run_dir: Path, name: str = "metrics.jsonl") -> Counter[Value]:
    """Return every value of a run's own record, by the run's own names; none where it lacks that file."""
    found: Counter[Value] = Counter()
    lines = (run_dir / name).read_text().splitlines() if (run_dir / name).exists() else []
    for line in lines:
        told: dict[str, Any] = json.loads(line)
        prefix = "evaluation/" if "evaluation" in told else ""
        for metric, value in (told.get("metrics") or told["evaluation"]).items():
            found[prefix + metric, told["step"], int(told["time"] * 1000), _comparable(float(value))] += 1
    return found


def _comparable(value: float) -> float | str:
    return value if value == value else "nan"
