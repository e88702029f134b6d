"""A real MLflow server that can be killed, stopped and started again, and what a run has there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run


class Server:
    """An MLflow server in a process group of its own, on one port of this machine; as a context, it is started.

    Args:
        folder: where its database and artifacts are, which stay when it is killed.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, seconds: float = 180) -> None:
        """Start it, and wait until it answers."""
        command = [
            sys.executable, "-m", "mlflow", "server", "--workers", "1",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--backend-store-uri", f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination", str(self.folder / "artifacts"),
        ]  # fmt: skip
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        log = self.folder / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not come up:\n{log.read_text()}")

    def kill(self) -> None:
        """With SIGKILL, all of its processes; the port is free when this returns."""
        if self._process is not None:
            self._send(signal.SIGKILL)
            self._process.wait(10)
            deadline = time.monotonic() + 10
            while self._is_listening() and time.monotonic() < deadline:
                time.sleep(0.05)

    def stop(self) -> None:
        """It accepts connections from here on, and answers nothing."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """It answers again, first what it was asked while it stood still."""
        self._send(signal.SIGCONT)

    def _is_listening(self) -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.uri)

    def runs(self) -> list[Run]:
        """All that it has."""
        return list(
            self.client.search_runs([found.experiment_id for found in self.client.search_experiments()])
        )


Value = tuple[str, int, int, float | str]
"""Metric, step, unix milliseconds, value: NaN as text, which is equal to itself."""


def history(client: MlflowClient, run: Run) -> Counter[Value]:
    """Every value that MLflow has of a run, and how often."""
    return Counter(
        (name, metric.step, metric.timestamp, _comparable(metric.value))
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    )


def recorded_values(run_dir: Path, name: str = "metrics.jsonl") -> Counter[Value]:
    """Every value of a run's own record, if it has that file; names are not translated as MLflow wants them."""
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
