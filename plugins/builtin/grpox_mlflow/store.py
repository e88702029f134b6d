"""Opens the tracking store; an unusable store is an error within seconds."""

from __future__ import annotations

import os
import shlex
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from filelock import FileLock

from grpox.errors import redact
from grpox.toolkit import chain, preserve_env, text_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCAL_UI = "http://127.0.0.1:5000"
"""Address at which `mlflow ui` listens by default."""
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment of model training. MLflow 3.17 ignores it: the browser chooses between its two views."""
PROBE_SECONDS = 5
"""Seconds that the start of a run waits for an answer."""
OPEN_SECONDS = 120
"""Seconds that a run waits for other processes that open the same SQLite file."""
_SQLITE = "sqlite:///"
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_ERROR_LENGTH = 500
_PASSING = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"}


def resolved_uri(configured: str | None) -> str:
    """Resolve the tracking URI; an SQLite path becomes absolute, as the process may change folders."""
    uri = configured or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    path = sqlite_path(uri)
    return uri if path is None else f"{_SQLITE}{path}"


def sqlite_path(uri: str) -> Path | None:
    """Return the absolute path of the SQLite file in `uri`, or None for another kind of store."""
    name = uri.removeprefix(_SQLITE)
    return None if name in (uri, "", ":memory:") else Path(name).absolute()


@contextmanager
def quick_requests(seconds: int = PROBE_SECONDS) -> Iterator[None]:
    """Limit MLflow's HTTP requests to one attempt of `seconds`, instead of retries for minutes.

    MLflow also stops printing a run's address each time that the run's end is written.
    """
    quick = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds),
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    with preserve_env(*quick):
        os.environ.update(quick)
        yield


def open_store(uri: str, experiment: str) -> tuple[MlflowClient, str]:
    """Return a client of the store, and the id of `experiment`, which is created if missing.

    Raises:
        Exception: the store cannot be used now; `is_passing` tells whether a retry may succeed.
    """
    path = sqlite_path(uri)
    with _alone(path):
        _probe(uri, path)
    # Imported here because it takes two seconds; a missing database is reported before.
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    with _alone(path):
        client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(experiment)
        if known is None:
            # Artifacts lie beside the database; MLflow would put them into the current working directory.
            location = None if path is None else (path.parent / "mlartifacts").as_uri()
            try:
                return client, str(client.create_experiment(experiment, location, KIND))
            except MlflowException:
                # Another run that started at the same time may have created it.
                known = client.get_experiment_by_name(experiment)
                if known is None:
                    raise
        if known.lifecycle_stage != "active":
            raise ValueError(f"experiment {experiment!r} was deleted: restore it or name another")
        return client, str(known.experiment_id)


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """Lock an SQLite file while it is opened: MLflow fails if two processes create its tables at once.

    Raises:
        TimeoutError: other processes had the lock for all of `OPEN_SECONDS`.
    """
    if path is None:
        yield
        return
    file = path.with_name(f"{path.name}.lock")
    with FileLock(file, OPEN_SECONDS, thread_local=False):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)  # a waiting process sees this, and creates another


def is_passing(error: Exception) -> bool:
    """Tell whether a retry may succeed after an error: no answer, a failing server, a locked database."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code in _PASSING
    if isinstance(error, sqlite3.OperationalError):
        return "locked" in str(error)
    return isinstance(error, ConnectionError | TimeoutError | socket.gaierror)


def format_error(error: Exception) -> str:
    """Describe an error in one line without secrets; in a chain, the system error at its root."""
    root = list(chain(error, with_contexts=True))[-1]
    text = (
        redact(" ".join(text_of(root if isinstance(root, OSError) else error).split())) or type(root).__name__
    )
    return text if len(text) <= _ERROR_LENGTH else f"{text[:_ERROR_LENGTH]} ..."


def addresses(uri: str, experiment_id: str, run_id: str) -> dict[str, str]:
    """Return a run's page as ``run``; for a store without a server, first the command that serves it as
    ``serve``."""
    shown = redact(uri)
    if shown.startswith("databricks"):
        return {"run": shown}
    is_server = shown.startswith(("http://", "https://"))
    page = f"{(shown if is_server else LOCAL_UI).rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    if is_server:
        return {"run": page}
    path = sqlite_path(uri)
    if path is not None and path.is_relative_to(Path.cwd()):
        shown = f"sqlite:///{path.relative_to(Path.cwd())}"
    return {"serve": f"mlflow ui --backend-store-uri {shlex.quote(shown)}", "run": page}


def _probe(uri: str, path: Path | None) -> None:
    """Raise if MLflow would retry for minutes: the database is missing, or the file is not a database."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=PROBE_SECONDS)) as connection:
            connection.execute("BEGIN IMMEDIATE")
    parts = urlsplit(uri)
    default_port = _DATABASE_PORTS.get(parts.scheme.partition("+")[0])
    if default_port is not None and parts.hostname:
        socket.create_connection((parts.hostname, parts.port or default_port), PROBE_SECONDS).close()
