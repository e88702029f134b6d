"""The MLflow run above those of a sweep: in a real SQLite store, and where the store is away."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.logs import LoggedText

from grpox.contracts import SweepContext, SweepResults, SweptRun
from grpox.errors import RunFailed
from grpox.runfile.load import load_run
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.parent import ParentRun
from grpox_mlflow.sync import sync

if TYPE_CHECKING:
    from mlflow import MlflowClient

AXES = {"train.seed": ("0", "1")}
PARAMS = {"train.seed": "0, 1", "sweep.run": "run.yaml", "sweep.runs": "2"}


@pytest.fixture
def client(store: str) -> MlflowClient:
    return import_module("mlflow").MlflowClient(store)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine-sweep").mkdir()
    return tmp_path / "mine-sweep"


def begin(folder: Path, store: str, axes: dict[str, tuple[str, ...]] = AXES, **config: Any) -> ParentRun:
    sweep = SweepContext(load_run("quickstart").config, folder, "run.yaml", axes, 2)
    return ParentRun(MlflowConfig(tracking_uri=store, experiment="sweeps", **config), sweep)


def results(*runs: tuple[str, float | None], ids: tuple[str, ...] = ()) -> SweepResults:
    """(status, reward) of the run of each seed."""
    found = [
        SweptRun(f"seed={seed}", {"train.seed": str(seed)}, status, value, 2, 1.0, f"s/seed={seed}", run_id)
        for seed, ((status, value), run_id) in enumerate(zip_longest(runs, ids))
    ]
    return SweepResults("run.yaml", "reward", False, tuple(found))


def end(parent: ParentRun, status: str = "FINISHED", children: tuple[str, ...] = ()) -> None:
    parent.update(results(("FINISHED", 0.25), ("RUNNING", None)))
    parent.conclude(results(("FINISHED", 0.25), (status, 0.5), ids=children), status)


def test_it_has_the_grid_the_course_of_the_best_and_the_table(
    folder: Path, store: str, client: MlflowClient, tmp_path: Path, logged: LoggedText
) -> None:
    parent = begin(folder, store, tags={"team": "maths"})
    assert parent.run_id is not None
    assert client.get_run(parent.run_id).info.status == "RUNNING"
    child = client.create_run(client.get_run(parent.run_id).info.experiment_id).info.run_id
    end(parent, children=(child,))
    stored = client.get_run(parent.run_id)
    assert (stored.info.status, stored.info.run_name) == ("FINISHED", "mine-sweep")
    assert stored.data.params == PARAMS
    assert {"team": "maths", "grpox.best": "seed=1"}.items() <= stored.data.tags.items()
    course = client.get_metric_history(parent.run_id, "best/reward")
    assert [(value.step, value.value) for value in course] == [(1, 0.25), (2, 0.5)]
    fetched = client.download_artifacts(parent.run_id, "sweep_table.json", str(tmp_path))
    table = json.loads(Path(fetched).read_text())
    assert table["columns"][:4] == ["train.seed", "status", "reward", "best"]
    assert [row[:4] for row in table["data"]] == [["0", "FINISHED", 0.25, False], ["1", "FINISHED", 0.5, True]]
    assert dict(zip(table["columns"], table["data"][0], strict=True))["run_id"] == child
    assert json.loads(stored.data.tags["mlflow.loggedArtifacts"])[0]["path"] == "sweep_table.json"
    # A run that began while the store was away is made a child now.
    assert client.get_run(child).data.tags["mlflow.parentRunId"] == parent.run_id
    assert parent.run_id in logged()


def test_a_sweep_goes_on_in_its_run_with_a_larger_grid(folder: Path, store: str, client: MlflowClient) -> None:
    first = begin(folder, store)
    end(first, status="FAILED")
    assert first.run_id is not None
    failed = client.get_run(first.run_id)
    assert (failed.info.status, failed.data.tags["grpox.error"]) == ("FAILED", "1 of 2 runs did not finish")
    again = begin(folder, store, {"train.seed": ("0", "1", "2")})
    assert again.run_id == first.run_id
    end(again)
    stored = client.get_run(first.run_id)
    assert stored.info.status == "FINISHED"
    assert "grpox.error" not in stored.data.tags
    assert stored.data.params == PARAMS  # they never change
    assert stored.data.tags["changed.train.seed"] == "0, 1 -> 0, 1, 2"


def test_a_store_may_be_away(folder: Path, store: str, client: MlflowClient, logged: LoggedText) -> None:
    parent = begin(folder, "http://127.0.0.1:9")
    assert parent.run_id is None
    end(parent)
    assert logged().count(f"nothing is lost: grpox sync {folder}") == 2
    assert sync(folder, store).status == "FINISHED"
    told = json.loads((folder / "mlflow.json").read_text())
    stored = client.get_run(told["run_id"])
    assert (stored.info.status, stored.data.params) == ("FINISHED", PARAMS)
    assert stored.data.metrics["best/reward"] == 0.5


def test_secrets_are_masked_and_wrong_addresses_told(folder: Path, store: str, client: MlflowClient) -> None:
    with pytest.raises(RunFailed, match="foo"):
        begin(folder, "foo://x")
    parent = begin(folder, store, {"generator.api_key": ("hush", "psst")})
    end(parent)
    assert client.get_run(str(parent.run_id)).data.params["generator.api_key"] == "***"
    assert not any("hush" in path.read_text() for path in folder.iterdir() if path.is_file())
