"""Opens the tracking store: finds out in seconds that it cannot be used, and says what to do."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from grpox.errors import RunFailed

if TYPE_CHECKING:
    from mlflow import MlflowClient

PROBE_SECONDS = 5
_SQLITE = "sqlite:///"
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_QUICK = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(PROBE_SECONDS),
}


def resolved_uri(configured: str | None) -> str:
    """The tracking URI of a run; an SQLite file's path becomes absolute: the process may change folders."""
    uri = configured or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    path = sqlite_path(uri)
    return uri if path is None else f"{_SQLITE}{path}"


def sqlite_path(uri: str) -> Path | None:
    """Absolute path of the SQLite file `uri` names, or None when it names none."""
    name = uri.removeprefix(_SQLITE)
    return None if name in (uri, "", ":memory:") else Path(name).absolute()


@contextmanager
def quick_requests() -> Iterator[None]:
    """Within it MLflow tries an HTTP request once, for 5 s, where it would try for four minutes."""
    before = {name: os.environ.get(name) for name in _QUICK}
    os.environ.update(_QUICK)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def open_store(uri: str, experiment: str) -> tuple[MlflowClient, str]:
    """A client of the store and the id of `experiment`, created where it is missing.

    Raises:
        RunFailed: the store cannot be used; told within some 10 s.
    """
    try:
        _probe(uri)
        # Imported here because it takes two seconds, which a store that is not there need not cost.
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        with quick_requests():
            return client, _experiment_id(client, uri, experiment)
    except Exception as error:
        raise RunFailed(
            f"MLflow cannot use the tracking store {without_password(uri)}: {error}\n"
            "    start it (mlflow server --host 127.0.0.1 --port 5000), give another one in\n"
            "    tracking.mlflow.tracking_uri or MLFLOW_TRACKING_URI (sqlite:///mlflow.db needs no server),\n"
            "    or train without MLflow: tracking={}"
        ) from error


def without_password(uri: str) -> str:
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))


def _probe(uri: str) -> None:
    """Raise where MLflow itself would retry for minutes: a database that is not there, or is none."""
    path = sqlite_path(uri)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=PROBE_SECONDS)) as connection:
            connection.execute("BEGIN IMMEDIATE")
    parts = urlsplit(uri)
    default_port = _DATABASE_PORTS.get(parts.scheme.partition("+")[0])
    if default_port is not None and parts.hostname:
        socket.create_connection((parts.hostname, parts.port or default_port), PROBE_SECONDS).close()


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        path = sqlite_path(uri)
        # Beside the database, where MLflow would put them into the working directory of the moment.
        location = None if path is None else (path.parent / "mlartifacts").as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:
            # Another run that started at the same time may have created it.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise ValueError(f"experiment {name!r} was deleted: restore it or name another")
    return str(found.experiment_id)
