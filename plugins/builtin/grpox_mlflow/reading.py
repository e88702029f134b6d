"""Runs in MLflow's store, only read and never written: a missing store is an error and is not created.

Importing this module does not import MLflow, which takes two seconds; a wrong address is reported without that
wait.
"""

from __future__ import annotations

import re
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from grpox.errors import ConfigError, Problem, RunFailed, nearest, redact, redacted
from grpox.toolkit import text_of
from grpox_mlflow.followed import FollowedRun, address_of
from grpox_mlflow.naming import FOLDER_TAG, KEY_TAG
from grpox_mlflow.store import format_error, probe, quick_requests, resolved_uri, sqlite_path
from grpox_mlflow.tracked import Course, Point, TrackedRun, moment, shown_path

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

REQUEST_SECONDS = 20
"""Time limit in seconds for a server's answer."""
_TABLES = {"alembic_version", "experiments", "runs"}
"""Tables that every MLflow database has. MLflow would create them in a database without them."""
_MOST_NAMED = 8
"""Largest number of runs that a message lists."""
_LOOKED_AT = 200
"""Number of newest runs that are searched for a similar name."""


class Store:
    """The runs of grpox in one tracking store."""

    def __init__(self, client: MlflowClient, uri: str) -> None:
        self._client = client
        self.uri = uri

    has_ids = True

    @property
    def place(self) -> str:
        """The store's address without a password."""
        return redact(self.uri)

    def address_of(self, run: TrackedRun) -> str:
        """Return the store's address; every run is in the same one."""
        return self.uri

    @cached_property
    def experiments(self) -> dict[str, str]:
        """Return id -> name of the experiments that were not deleted."""
        names: dict[str, str] = {}
        token = None
        while token != "":
            page = self._client.search_experiments(page_token=token)
            names |= {experiment.experiment_id: experiment.name for experiment in page}
            token = page.token or ""
        return names

    def newest(self, most: int, experiment: str | None, status: str | None) -> list[TrackedRun]:
        """Return the newest runs.

        Raises:
            ConfigError: there is no such experiment.
        """
        return self.search("" if status is None else f"attributes.status = '{status}'", most, experiment)

    def search(self, condition: str = "", most: int = 100, experiment: str | None = None) -> list[TrackedRun]:
        """Return at most `most` runs, the newest first, in one request.

        Args:
            condition: filter in MLflow's search language.
            experiment: name of the only experiment to search.

        Raises:
            ConfigError: there is no such experiment.
        """
        names = self.experiments
        chosen = [each for each, name in names.items() if experiment in (None, name)]
        if not chosen:
            if experiment is None:
                return []
            known = sorted(names.values())
            what, near = f"no such experiment in {redact(self.uri)}", nearest(experiment, known)
            raise ConfigError(what, "--experiment", given=experiment, allowed=", ".join(known), nearest=near)
        wanted = f"tags.`{KEY_TAG}` != ''" + (f" AND {condition}" if condition else "")
        newest_first = ["attributes.start_time DESC"]
        runs = self._client.search_runs(chosen, wanted, max_results=most, order_by=newest_first)
        return [_tracked(run, names.get(run.info.experiment_id, "")) for run in runs]

    def course(self, run: TrackedRun, metric: str) -> Course | None:
        """Return a metric's values by step, the last value of a repeated step; None if the run has none."""
        if metric not in run.last:
            return None
        values = self._client.get_metric_history(run.run_id, metric)
        points = sorted((Point(v.step, v.value, v.timestamp) for v in values), key=lambda p: (p.step, p.time))
        last_of_step = {point.step: point for point in points}
        return Course(metric, list(last_of_step.values())) if points else None

    def artifacts(self, run: TrackedRun) -> dict[str, int | None]:
        """Return name -> number of files in a folder, or None for a file."""
        entries = self._client.list_artifacts(run.run_id)
        return {
            entry.path: len(self._client.list_artifacts(run.run_id, entry.path)) if entry.is_dir else None
            for entry in entries
        }


@contextmanager
def reading(uri: str) -> Iterator[Store]:
    """Open the store at `uri` for reading, within the context.

    Raises:
        ConfigError: the store does not exist, or MLflow is not installed.
        RunFailed: the store cannot be read or does not answer.
    """
    try:
        with quick_requests(REQUEST_SECONDS):
            tables = _tables_in(uri)
            yield Store(_client(uri, tables), uri)
    # MLflow passes on any error of its databases and of the network.
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if not isinstance(error, OSError) and package not in ("mlflow", "sqlalchemy", "requests", "sqlite3"):
            raise
        raise RunFailed(f"MLflow at {redact(uri)} cannot be read: {format_error(error)}") from error


@contextmanager
def find_runs(names: list[str], uri: str | None) -> Iterator[tuple[Store, list[TrackedRun]]]:
    """Open the store with the runs that `names` refer to: ids, beginnings of ids, names or folders.

    Args:
        uri: address of the store; default: the store of the first name that is a run's folder, else the store
            that a run would use.

    Raises:
        ConfigError: a name matches no run, or several.
    """
    followed = (FollowedRun.read(Path(name)) for name in names)
    first = next((each for each in followed if each is not None), None)
    with reading(resolved_uri(uri) if uri is not None or first is None else address_of(first)) as store:
        yield store, [_find_run(store, name) for name in names]


def _tracked(run: Run, experiment: str) -> TrackedRun:
    info, data = run.info, run.data
    # Only a run's full record has the step of each value.
    values = data.to_proto().metrics
    return TrackedRun(
        run_id=info.run_id,
        experiment_id=info.experiment_id,
        experiment=experiment,
        name=info.run_name or "",
        status=info.status,
        started=info.start_time or 0,
        ended=info.end_time or None,
        params=redacted(dict(data.params)),
        tags=redacted(dict(data.tags)),
        last={metric.key: Point(metric.step, metric.value, metric.timestamp) for metric in values},
        artifact_uri=info.artifact_uri or "",
    )


def _find_run(store: Store, name: str) -> TrackedRun:
    if (in_folder := _in_folder(store, name)) is not None:
        return in_folder
    conditions = [f"attributes.run_id LIKE '{name}%'"] if re.fullmatch("[0-9a-f]{1,32}", name) else []
    if (quoted := _quote(name)) is not None:
        conditions.append(f"attributes.run_name = {quoted}")
    # A name may also be the beginning of another run's id.
    matches = {run.run_id: run for condition in conditions for run in store.search(condition)}
    if not matches:
        raise ConfigError(_no_run(store, name))
    if name in matches or len(matches) == 1:
        return matches.get(name) or next(iter(matches.values()))
    runs = list(matches.values())[:_MOST_NAMED]
    each = ", ".join(f"{run.short_id} ({run.name}, {run.status}, {moment(run.started)})" for run in runs)
    more = f" and {len(matches) - _MOST_NAMED} more" if len(matches) > _MOST_NAMED else ""
    raise ConfigError(f"means {len(matches)} runs", "RUN", given=name, allowed=f"one of {each}{more}")


def _in_folder(store: Store, name: str) -> TrackedRun | None:
    """Return the run whose record is in the folder `name`; if that run is gone, the last run written there."""
    folder = Path(name)
    followed = FollowedRun.read(folder)
    if followed is None:
        # The name of a run is not a path.
        quoted = _quote(str(folder.absolute())) if folder.name else None
        runs = store.search(f"tags.`{FOLDER_TAG}` = {quoted}", most=1) if quoted else []
        return runs[0] if runs else None
    if runs := store.search(f"tags.`{KEY_TAG}` = '{followed.key}'", most=1):
        return runs[0]
    what = f"{redact(store.uri)} does not have the run in this folder"
    raise ConfigError(what, "RUN", given=name, allowed=f"after: grpox sync {name}")


def _quote(text: str) -> str | None:
    """Quote `text` for MLflow's searches, which have no escapes; None if it contains both kinds of quotes."""
    return next((f"{quote}{text}{quote}" for quote in "'\"" if quote not in text), None)


def _no_run(store: Store, name: str) -> Problem:
    if (Path(name) / "config.yaml").exists():
        what = "is the folder of a run without MLflow: its tracking names no mlflow"
        return Problem(what, "RUN", given=name)
    runs = store.search(most=_LOOKED_AT)
    folders = [shown_path(run.folder) for run in runs if run.folder is not None]
    near = nearest(name, [*(run.name for run in runs), *(run.short_id for run in runs), *folders])
    what, allowed = (
        f"no such run in {redact(store.uri)}",
        "id, name or folder of a run: grpox runs list --mlflow",
    )
    return Problem(what, "RUN", given=name, allowed=allowed, nearest=near)


def _tables_in(uri: str) -> set[str]:
    """Return the tables of an SQLite file; for another store, an empty set.

    Raises:
        ConfigError: the store does not exist: MLflow would create it.
        OSError: no server listens there: MLflow would retry for minutes.
    """
    scheme, _, rest = uri.partition(":")
    # sqlite+pysqlite:///mlflow.db
    path = sqlite_path(f"sqlite:{rest}") if scheme.partition("+")[0] == "sqlite" else None
    parts = urlsplit(uri)
    tables, missing = set[str](), ""
    if path is not None and not path.is_file():
        missing = "there is no such database"
    elif path is not None:
        # Open for reading only: otherwise SQLite creates a missing file.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            tables = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        missing = "" if tables >= _TABLES else "is not a database of MLflow"
    elif parts.scheme in ("", "file"):
        folder = Path(url2pathname(parts.path)) if parts.scheme else Path(uri)
        missing = "" if any(folder.glob("*/meta.yaml")) else "is not a folder with MLflow runs"
    else:
        probe(uri)
    if missing:
        allowed = (
            "--uri sqlite:///PATH, --uri http://HOST:5000 or MLFLOW_TRACKING_URI; the default is mlflow.db in "
            "the working directory, which a tracked run creates"
        )
        raise ConfigError(missing, key="MLflow's tracking store", given=redact(uri), allowed=allowed)
    return tables


def _client(uri: str, tables: set[str]) -> MlflowClient:
    try:
        import mlflow
    except ModuleNotFoundError as error:
        what = f"MLflow is not installed here: {text_of(error)}"
        raise ConfigError(what, allowed="pip install mlflow, in this environment") from error
    if tables:
        # Imported so that the metadata has every table.
        import mlflow.store.tracking.sqlalchemy_store
        from mlflow.store.db.base_sql_model import Base

        # On opening a database without the tables of its version, MLflow would migrate it.
        if not tables >= set(Base.metadata.tables):
            raise RunFailed(
                f"the database {redact(uri)} is older than MLflow {mlflow.__version__}, which would change it\n"
                f"    after a backup: mlflow db upgrade {shlex.quote(redact(uri))}"
            )
    return mlflow.MlflowClient(tracking_uri=uri)
