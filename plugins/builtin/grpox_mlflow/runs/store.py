"""Reads MLflow's store, and writes nothing there: one that is not there is told and not made.

Importing this imports no MLflow: that takes two seconds, which a mistake in the address need not cost.
"""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from grpox.errors import ConfigError, Problem, RunFailed, nearest, redact, redacted
from grpox.toolkit import text_of
from grpox_mlflow.runs.tracked import KEY_TAG, Point, TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

REQUEST_SECONDS = 20
"""How long a server may take for an answer."""
_TABLES = {"alembic_version", "experiments", "runs"}
"""What a database of MLflow has; in one without them MLflow would make them."""
_OF_GRPOX = f"tags.`{KEY_TAG}` != ''"
_NEWEST_FIRST = ["attributes.start_time DESC"]


class Store:
    """The runs of grpox in one tracking store."""

    def __init__(self, client: MlflowClient, uri: str) -> None:
        self._client = client
        self.uri = uri
        self._experiments: dict[str, str] | None = None

    @property
    def experiments(self) -> dict[str, str]:
        """Id -> name of those that were not deleted."""
        if self._experiments is None:
            found = _every_page(lambda token: self._client.search_experiments(page_token=token))
            self._experiments = {experiment.experiment_id: experiment.name for experiment in found}
        return self._experiments

    def search(self, condition: str = "", most: int = 100, experiment: str | None = None) -> list[TrackedRun]:
        """The newest runs first, at most `most`, in one request.

        Args:
            condition: in MLflow's language of searches.
            experiment: only runs of the one of this name.

        Raises:
            ConfigError: there is no such experiment.
        """
        names = self.experiments
        chosen = [known for known, name in names.items() if experiment in (None, name)]
        if experiment is not None and not chosen:
            known = sorted(names.values())
            near = nearest(experiment, known)
            what = f"no such experiment in {redact(self.uri)}"
            raise ConfigError(
                Problem(what, "--experiment", given=experiment, allowed=", ".join(known), nearest=near)
            )
        if not chosen:
            return []
        wanted = f"{_OF_GRPOX} AND {condition}" if condition else _OF_GRPOX
        found = self._client.search_runs(chosen, wanted, max_results=most, order_by=_NEWEST_FIRST)
        return [_tracked(run, names.get(run.info.experiment_id, "")) for run in found]

    def history(self, run: TrackedRun, metric: str) -> list[Point]:
        """Every value of a metric, by step; of a step that was taken again, the last."""
        found = self._client.get_metric_history(run.run_id, metric)
        points = sorted((Point(m.step, m.value, m.timestamp) for m in found), key=lambda p: (p.step, p.time))
        return list({point.step: point for point in points}.values())

    def artifacts(self, run: TrackedRun) -> dict[str, int | None]:
        """Name -> files in it, of a folder; None of a file."""
        entries = self._client.list_artifacts(run.run_id)
        return {
            entry.path: len(self._client.list_artifacts(run.run_id, entry.path)) if entry.is_dir else None
            for entry in entries
        }


def default_uri(given: str | None) -> str:
    """The store as a run would choose it.

    Raises:
        ConfigError: the plugin for MLflow is not installed.
    """
    try:
        from grpox_mlflow.store import resolved_uri
    except ModuleNotFoundError as error:
        raise ConfigError(Problem("grpox's plugin for MLflow is not installed here")) from error
    return resolved_uri(given)


@contextmanager
def reading(uri: str) -> Iterator[Store]:
    """The store at `uri`, to be read within.

    Raises:
        ConfigError: it is not there, or MLflow is not.
        RunFailed: it cannot be read, or does not answer.
    """
    from grpox_mlflow.store import quick_requests, told

    try:
        with quick_requests(REQUEST_SECONDS):
            tables = _look_for(uri)
            yield Store(_client(uri, tables), uri)
    # MLflow hands on whatever its databases and the network raise.
    except Exception as error:
        if not _is_from_outside(error):
            raise
        raise RunFailed(f"MLflow at {redact(uri)} cannot be read: {told(error)}") from error


def _is_from_outside(error: Exception) -> bool:
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or package in ("mlflow", "sqlalchemy", "requests", "sqlite3")


def _client(uri: str, tables: set[str]) -> MlflowClient:
    try:
        from mlflow import MlflowClient
    except ModuleNotFoundError as error:
        what = f"MLflow is not installed here: {text_of(error)}"
        raise ConfigError(Problem(what, allowed="pip install mlflow, in this environment")) from error
    if tables:
        _must_not_migrate(uri, tables)
    return MlflowClient(tracking_uri=uri)


def _must_not_migrate(uri: str, tables: set[str]) -> None:
    """MLflow would bring a database that lacks tables of its version up to date as soon as it opens it."""
    # For what it imports: then the metadata has every table.
    import mlflow.store.tracking.sqlalchemy_store
    from mlflow.store.db.base_sql_model import Base

    if not tables >= set(Base.metadata.tables):
        raise RunFailed(
            f"the database {redact(uri)} is older than MLflow {mlflow.__version__}, which would change it\n"
            f"    after a backup: mlflow db upgrade {shlex.quote(redact(uri))}"
        )


def _look_for(uri: str) -> set[str]:
    """The tables of an SQLite file, of another store none.

    Raises:
        ConfigError: the store is not there: MLflow would make it.
        OSError: nothing listens there: MLflow would try to reach it for minutes.
    """
    from grpox_mlflow.store import probe, sqlite_path

    scheme, _, rest = uri.partition(":")
    # sqlite+pysqlite:///mlflow.db
    path = sqlite_path(f"sqlite:{rest}") if scheme.partition("+")[0] == "sqlite" else None
    parts = urlsplit(uri)
    if path is not None:
        return _tables_in(path, uri)
    if parts.scheme in ("", "file"):
        folder = Path(url2pathname(parts.path)) if parts.scheme else Path(uri)
        if next(folder.glob("*/meta.yaml"), None) is None:
            raise _missing("is no folder in which MLflow keeps runs", uri)
    else:
        probe(uri)
    return set()


def _tables_in(path: Path, uri: str) -> set[str]:
    if not path.is_file():
        raise _missing("there is no such database", uri)
    # Opened to read: another way SQLite makes a file of a name that it does not find.
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        tables = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if not tables >= _TABLES:
        raise _missing("is no database of MLflow's", uri)
    return tables


def _missing(what: str, uri: str) -> ConfigError:
    allowed = (
        "--uri sqlite:///PATH, --uri http://HOST:5000 or MLFLOW_TRACKING_URI; by default mlflow.db in the "
        "working directory, which a tracked run makes there"
    )
    return ConfigError(Problem(what, key="MLflow's tracking store", given=redact(uri), allowed=allowed))


def _tracked(run: Run, experiment: str) -> TrackedRun:
    info, data = run.info, run.data
    # Only as a message has a run's data the step of each value.
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


def _every_page(ask: Any) -> Sequence[Any]:
    found, token = [], None
    while True:
        page = ask(token)
        found += page
        token = page.token
        if not token:
            return found
