"""`grpox runs` tells what MLflow's store holds of runs, as the plugin wrote them, and writes nothing."""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
import subprocess
import sys
import webbrowser
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.mlflow_store import migrated_store
from support.patience import patient
from typer.testing import CliRunner

from grpox.cli import app as cli
from grpox.config import RunConfig
from grpox.contracts import RunContext
from grpox.errors import ConfigError, RunFailed
from grpox.observing.record import LocalRecord
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.naming import flattened
from grpox_mlflow.reading import reading
from grpox_mlflow.tracked import BLOCKS, PLAIN_BLOCKS, Course, Point, changed_params, same, sparkline
from grpox_mlflow.tracker import MlflowTracker
from grpox_mlflow.views import places

CONFIG: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "rewards": [{"name": "exact", "column": "answer"}],
    # clip_low is given as the default.
    "loss": {"name": "dapo", "clip_low": 0.2, "clip_high": 0.3},
    "train": {"max_steps": 3, "seed": 7},
}
REWARDS = (0.25, 0.75, 0.5)


class Stored:
    """A store with the runs that the tests read, each written by the tracker as a run drives it."""

    def __init__(self, folder: Path) -> None:
        from mlflow import MlflowClient

        self.folder = folder
        self.uri = f"sqlite:///{migrated_store(folder)}"
        self.client = MlflowClient(self.uri)

    def write(
        self,
        name: str,
        changes: Mapping[str, Any] | None = None,
        error: BaseException | None = None,
        rewards: tuple[float, ...] = REWARDS,
        over: bool = True,
        **tracking: Any,
    ) -> None:
        config = RunConfig.model_validate({**CONFIG, **(changes or {})})
        run = RunContext(config, self.folder / name, 3, 2, {"grpox": "0.1.0"}, "abc123", "run.yaml")
        settings = MlflowConfig(tracking_uri=self.uri, run_name=name, **tracking)
        record, tracker = LocalRecord(), MlflowTracker(settings)
        record.grpox_run_started(run)
        tracker.grpox_run_started(run)
        record.grpox_evaluated(0, {"accuracy": 0.125})
        for step, reward in enumerate(rewards, 1):
            record.grpox_step_finished(step, {"reward": reward, "sampling/kl": math.nan, "grad_norm": 1.0})
            tracker.grpox_step_finished({})
        if not over:
            # As a process that was killed leaves it.
            assert tracker._writer is not None
            tracker._writer.close(patient(60), lambda: None)
            tracker._environment.close()
        elif error is None:
            record.grpox_evaluated(3, {"accuracy": 0.875})
            (run.output_dir / "summary.json").write_text('{"steps": 3}')
            (run.output_dir / "report.html").write_text("<p>3 steps")
            tracker.grpox_run_finished()
        else:
            record.grpox_run_failed(run, error)
            tracker.grpox_run_failed(error)

    def id_of(self, name: str) -> str:
        ids = [experiment.experiment_id for experiment in self.client.search_experiments()]
        (run,) = self.client.search_runs(ids, f"attributes.run_name = '{name}'")
        return str(run.info.run_id)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Written once, as it takes seconds."""
    with pytest.MonkeyPatch.context() as changed:
        # However slow this machine is, the end of a run waits for all of it.
        changed.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", patient(60))
        return _written(Stored(tmp_path_factory.mktemp("store")))


def _written(stored: Stored) -> Stored:
    # What other tools keep in the same store is none of our business.
    foreign = stored.client.create_run(stored.client.create_experiment("other-tool"), run_name="foreign")
    stored.client.set_terminated(foreign.info.run_id)
    stored.write("first", tags={"team": "maths"})
    stored.write("second", {"train": {"max_steps": 3, "seed": 7, "learning_rate": 0.5}}, experiment="others")
    stored.write("broken", error=ValueError("odd"), rewards=(0.25,))
    stored.write("gone", rewards=(0.25, 0.5), over=False)
    return stored


@pytest.fixture(autouse=True)
def _in_the_stores_folder(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(stored.folder)


def grpox(*arguments: str, width: int = 200) -> Result:
    command, *others = arguments
    return CliRunner().invoke(cli.app, ["runs", command, "--mlflow", *others], env={"COLUMNS": str(width)})


def told(*arguments: str, width: int = 200) -> str:
    result = grpox(*arguments, width=width)
    assert result.exception is None, result.exception
    return result.stdout


def refused(*arguments: str) -> ConfigError:
    error = grpox(*arguments).exception
    assert isinstance(error, ConfigError), error
    return error


# -- list ------------------------------------------------------------------------------------------------


def test_the_list_has_every_run_of_grpox_the_newest_first() -> None:
    lines = told("list").splitlines()
    rows = [re.split(r" {2,}", line.strip()) for line in lines if re.match(r" [0-9a-f]{8} ", line)]
    assert [row[1] for row in rows] == ["gone", "broken", "second", "first"]
    by_name = {row[1]: row for row in rows}
    assert by_name["first"][2:4] == ["grpox", "FINISHED"]
    assert by_name["second"][2] == "others"
    assert by_name["first"][-4:] == ["3/3", "0.5", "accuracy 0.125 -> 0.875", "first"]
    assert by_name["broken"][3] == "FAILED"
    assert by_name["broken"][-4:] == ["1/3", "0.25", "accuracy 0.125", "broken"]
    # It was killed without a word: nobody knows how long it took.
    assert by_name["gone"][3] == "RUNNING"
    assert len(by_name["gone"]) == len(by_name["first"]) - 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--last", "2"], ["gone", "broken"]),
        (["--status", "finished"], ["second", "first"]),
        (["--status", "KILLED"], []),
        (["--experiment", "others"], ["second"]),
        (["--experiment", "other-tool"], []),
    ],
)
def test_the_list_can_be_narrowed_down(arguments: list[str], names: list[str]) -> None:
    assert [run["name"] for run in json.loads(told("list", "--json", *arguments))] == names


def test_an_empty_list_says_so() -> None:
    assert told("list", "--status", "killed").startswith("no such run in sqlite:///")


def test_the_list_as_json_has_the_values_themselves(stored: Stored) -> None:
    first = json.loads(told("list", "--json"))[-1]
    assert first["run_id"] == stored.id_of("first")
    assert (first["steps"], first["total_steps"], first["reward"]) == (3, 3, 0.5)
    assert first["evaluation"]["metric"] == "evaluation/accuracy"
    assert first["evaluation"]["first"] == {"step": 0, "value": 0.125}
    assert first["evaluation"]["last"] == {"step": 3, "value": 0.875}
    assert first["output_dir"] == str(stored.folder / "first")
    assert first["started"].endswith("+00:00")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_list_cuts_nothing_in_a_terminal_of_any_width(width: int) -> None:
    shown = told("list", width=width)
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    for value in ("gone", "FINISHED", "0.125", "0.875"):
        assert value in shown


@pytest.mark.parametrize(
    ("arguments", "near"),
    [(["--status", "finishd"], "FINISHED"), (["--experiment", "othrs"], "others")],
)
def test_a_status_or_experiment_that_is_none_is_refused(arguments: list[str], near: str) -> None:
    (problem,) = refused("list", *arguments).problems
    assert (problem.key, problem.given, problem.nearest) == (*arguments, near)


# -- Which run -------------------------------------------------------------------------------------------


def shown(run: str, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(told("show", run, "--json", *arguments)))


def test_a_run_is_known_by_id_prefix_name_and_folder(stored: Stored, tmp_path: Path) -> None:
    run_id = stored.id_of("first")
    for spelling in (run_id, run_id[:12], "first", str(stored.folder / "first")):
        assert shown(spelling, "--uri", stored.uri)["run_id"] == run_id


def test_a_folder_knows_its_store(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(str(stored.folder / "second"))["name"] == "second"


def test_what_means_several_runs_is_refused_with_all_of_them(stored: Stored) -> None:
    (experiment,) = [e for e in stored.client.search_experiments() if e.name == "grpox"]
    # Of 17 ids two begin with the same digit.
    twins = [stored.client.create_run(experiment.experiment_id, tags={"grpox.run": "x"}, run_name="twin")
             for _ in range(17)]  # fmt: skip
    ids = [str(run.info.run_id) for run in twins]
    digit = next(one[0] for one in ids if sum(other[0] == one[0] for other in ids) > 1)
    try:
        (of_name,) = refused("show", "twin").problems
        (of_digit,) = refused("show", digit).problems
    finally:
        for run_id in ids:
            stored.client.delete_run(run_id)
    assert of_name.what == "means 17 runs"
    assert sum(run_id[:8] in of_name.allowed for run_id in ids) == 8
    assert of_name.allowed.endswith("and 9 more")
    assert sum(f"{run_id[:8]} (twin, RUNNING" in of_digit.allowed for run_id in ids) >= 2
    # What was deleted is gone.
    assert refused("show", "twin").problems[0].what.startswith("no such run in")


@pytest.mark.parametrize(
    ("slip", "near"), [("secnd", "second"), ('o\'neill "x"', ""), ("../broken", "broken"), ("xyz", "")]
)
def test_what_means_no_run_is_refused_with_the_nearest(slip: str, near: str) -> None:
    (problem,) = refused("show", slip).problems
    assert (problem.key, problem.given, problem.nearest) == ("RUN", slip, near)
    assert "grpox runs list" in problem.allowed


def test_a_folder_whose_run_the_store_lacks_says_how_it_gets_there(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = json.loads((stored.folder / "first" / "mlflow.json").read_text())
    (tmp_path / "mlflow.json").write_text(json.dumps({**followed, "key": "never", "run_id": None}))
    (problem,) = refused("show", str(tmp_path)).problems
    assert problem.allowed == f"after: grpox sync {tmp_path}"
    (tmp_path / "mlflow.json").unlink()
    (tmp_path / "config.yaml").touch()
    assert "tracking names no mlflow" in refused("show", str(tmp_path)).problems[0].what


# -- show ------------------------------------------------------------------------------------------------


def test_a_run_is_shown_with_what_makes_it_what_it_is() -> None:
    first = shown("first")
    assert first["params"] == {
        "model.path": "m",
        "data.path": "d.jsonl",
        "rewards.0.name": "exact",
        "loss.clip_high": "0.3",
        "train.max_steps": "3",
        "train.seed": "7",
    }
    assert first["tags"]["team"] == "maths"
    assert first["metrics"]["reward"] == {
        "first": {"step": 1, "value": 0.25},
        "last": {"step": 3, "value": 0.5},
        "lowest": {"step": 1, "value": 0.25},
        "highest": {"step": 2, "value": 0.75},
    }
    assert first["metrics"]["sampling/kl"]["last"] == {"step": 3, "value": "nan"}
    assert list(first["metrics"]) == ["reward", "sampling/kl", "grad_norm", "evaluation/accuracy"]
    assert first["artifacts"] == {"config.yaml": None, "report.html": None, "summary.json": None}


def test_all_shows_the_defaults_too() -> None:
    params = shown("first", "--all")["params"]
    assert (params["loss.clip_low"], params["train.beta"], params["run.world_size"]) == ("0.2", "0.0", "2")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_page_of_a_run_says_it_in_a_terminal_of_any_width(width: int, stored: Stored) -> None:
    lines = [re.sub(r" {2,}", "  ", line.strip()) for line in told("show", "first", width=width).splitlines()]
    assert all(len(line) <= width for line in lines)
    for line in ("git commit  abc123", "team  maths", "steps  3 of 3", "train.seed  7", "folder  first"):
        assert line in lines
    lowest = "0.25 at 1  " if width == 200 else ""
    assert f"reward  0.25  0.5  {lowest}0.75 at 2  ▁█▅" in lines
    assert "config.yaml, report.html, summary.json" in lines
    assert f"first  {stored.id_of('first')}  FINISHED" in lines


def test_a_run_that_failed_says_why_and_one_that_fell_silent_when() -> None:
    assert re.search(r"ended by +ValueError: odd\b", told("show", "broken"))
    assert re.search(r"newest value +\d+ .*ago", told("show", "gone"))
    assert "newest value" not in told("show", "first")


def test_what_a_run_was_resumed_with_is_shown_and_counts(stored: Stored) -> None:
    run_id = stored.id_of("broken")
    changes = {"train.learning_rate": "1e-06 -> 0.5 after step 1", "run.total_steps": "3 -> 8 after step 1"}
    for key, value in changes.items():
        stored.client.set_tag(run_id, f"changed.{key}", value)
    try:
        page = told("show", "broken")
        listed = json.loads(told("list", "--status", "failed", "--json"))
    finally:
        for key in changes:
            stored.client.delete_tag(run_id, f"changed.{key}")
    assert re.search(r"resumed with\s+train.learning_rate +1e-06 -> 0.5 after step 1\s", page)
    assert listed[0]["total_steps"] == 8
    assert "resumed with" not in told("show", "broken")


def test_the_folder_of_a_run_says_what_mlflow_says(stored: Stored) -> None:
    def in_folder(*arguments: str) -> Any:
        return json.loads(CliRunner().invoke(cli.app, ["runs", *arguments, "--json"]).stdout)

    first, of_folder = shown("first"), in_folder("show", "first")
    for key in ("run_id", "name", "experiment", "status", "steps", "total_steps", "params", "metrics"):
        assert of_folder[key] == first[key], key
    assert first["tags"] == {**of_folder["tags"], "mlflow.runName": "first"}
    listed = {run["name"]: run for run in json.loads(told("list", "--json"))}
    for run in in_folder("list"):
        # Its process was killed, which MLflow does not know.
        expected = "KILLED" if run["name"] == "gone" else listed[run["name"]]["status"]
        assert run == {
            **listed[run["name"]],
            **{key: run[key] for key in ("ended", "seconds")},
            "status": expected,
        }


# -- Parameters ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(discover())


def params_of(**sections: Any) -> dict[str, str]:
    config = RunConfig.model_validate({**CONFIG, "loss": "dapo", "train": {}, **sections})
    return dict(flattened(config.model_dump(mode="json")))


ALWAYS = {"model.path": "m", "data.path": "d.jsonl", "rewards.0.name": "exact"}


@pytest.mark.parametrize(
    ("sections", "changed"),
    [
        ({}, {}),
        ({"train": {"learning_rate": 1e-6, "num_generations": 8}}, {}),
        # An integer for a number is no change, one for another is.
        ({"sampling": {"temperature": 1}, "rewards": [{"name": "exact", "weight": 1}]}, {}),
        ({"rewards": [{"name": "exact", "weight": 2}]}, {"rewards.0.weight": "2.0"}),
        ({"evaluation": {"path": "e.jsonl", "every": 0}}, {"evaluation.path": "e.jsonl"}),
        ({"tracking": {"mlflow": {"experiment": "grpox", "tags": {}}}}, {}),
        ({"tracking": {"mlflow": {"experiment": "mine"}}}, {"tracking.mlflow.experiment": "mine"}),
        # Of what is named by its path, or is not installed, no default is known.
        ({"loss": {"path": "l.py:L", "clip_low": 0.2}}, {"loss.path": "l.py:L", "loss.clip_low": "0.2"}),
        ({"loss": {"name": "gone", "clip_low": 0.2}}, {"loss.name": "gone", "loss.clip_low": "0.2"}),
        ({"loss": {"name": "grpo", "clip_low": 0.2}}, {"loss.name": "grpo"}),
    ],
)
def test_only_what_is_not_the_default_has_changed(
    registry: Registry, sections: dict[str, Any], changed: dict[str, str]
) -> None:
    assert changed_params(params_of(**sections), registry) == ALWAYS | changed


def test_values_are_the_same_as_numbers() -> None:
    assert same("1e-06", "0.000001")
    assert same("True", "True")
    assert not same("True", "1")
    assert not same(None, "None")


# -- compare ---------------------------------------------------------------------------------------------


def test_runs_are_compared_by_what_differs_and_what_came_of_it(stored: Stored) -> None:
    first, broken = stored.id_of("first"), stored.id_of("broken")
    told_as = json.loads(told("compare", "second", "first", "broken", "--json"))
    assert [run["name"] for run in told_as["runs"]] == ["second", "first", "broken"]
    assert list(told_as["params"]) == ["train.learning_rate"]
    assert told_as["params"]["train.learning_rate"][first] == "1e-06"
    assert told_as["metrics"]["reward"][first]["highest"] == {"step": 2, "value": 0.75}
    assert told_as["metrics"]["reward"][broken]["last"] == {"step": 1, "value": 0.25}

    lines = [re.sub(r" {2,}", "  ", line.strip()) for line in told("compare", "first", "second").splitlines()]
    assert "train.learning_rate  1e-06  0.5" in lines
    assert "evaluation/accuracy, last  0.875  0.875" in lines
    assert "highest  0.75 at 2  0.75 at 2" in lines


def test_a_metric_may_be_chosen() -> None:
    chosen = json.loads(told("compare", "first", "broken", "--metric", "grad_norm", "--json"))
    assert list(chosen["metrics"]) == ["grad_norm"]
    (problem,) = refused("compare", "first", "broken", "--metric", "rewards").problems
    assert (problem.key, problem.given, problem.nearest) == ("--metric", "rewards", "reward")


def test_there_is_nothing_to_compare_with_one_run() -> None:
    assert grpox("compare", "first").exit_code == 2
    assert refused("compare", "first", "first").problems[0].what == "is given twice"


# -- open ------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that a browser was told to show."""
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(addresses.append(address)) or True)
    return addresses


def test_open_shows_the_report_and_says_how_to_serve_the_ui(stored: Stored, opened: list[str]) -> None:
    assert told("open", "first", "--no-browser") == told("open", "first")
    serve, page, report = told("open", "first", "--no-browser").splitlines()
    assert serve == "serve:  mlflow ui --backend-store-uri sqlite:///mlflow.db"
    assert re.fullmatch(
        rf"run:    http://127\.0\.0\.1:5000/#/experiments/\d+/runs/{stored.id_of('first')}", page
    )
    assert report == "report: first/report.html"
    assert opened == [(stored.folder / "first" / "report.html").as_uri()]


def test_open_shows_the_runs_own_report_where_another_run_has_its_folder(
    stored: Stored, opened: list[str]
) -> None:
    followed = stored.folder / "second" / "mlflow.json"
    before = followed.read_text()
    followed.write_text(json.dumps({**json.loads(before), "key": "another"}))
    try:
        told("open", stored.id_of("second"))
    finally:
        followed.write_text(before)
    (address,) = opened
    assert re.search(rf"/mlartifacts/.*{stored.id_of('second')}/artifacts/report\.html$", address)


def test_open_opens_nothing_where_there_is_no_report(opened: list[str]) -> None:
    assert told("open", "gone").splitlines()[-1] == "report: no report.html here"
    assert opened == []


def test_a_machine_without_a_browser_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    result = grpox("open", "first")
    assert (result.exit_code, result.stderr) == (0, "there is no browser to open here\n")


def test_of_a_server_the_page_is_opened(stored: Stored) -> None:
    with reading(stored.uri) as store:
        (run,) = store.search("attributes.run_name = 'first'")
    lines, address = places(run, "http://me:secret@host:5000/")
    assert "serve" not in lines
    assert address == f"http://me:***@host:5000/#/experiments/{run.experiment_id}/runs/{run.run_id}"


# -- The store -------------------------------------------------------------------------------------------


def test_reading_writes_nothing(stored: Stored) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in stored.folder.rglob("*") if path.is_file()}

    before = files()
    for command in (
        ["list"],
        ["show", "first"],
        ["compare", "first", "second"],
        ["open", "first", "--no-browser"],
    ):
        told(*command)
    assert files() == before


@pytest.mark.parametrize(
    ("uri", "what"),
    [
        (None, "there is no such database"),
        ("sqlite:///sub/none.db", "there is no such database"),
        ("sqlite+pysqlite:///none.db", "there is no such database"),
        ("sqlite:///empty.db", "is not a database of MLflow"),
        ("mlruns", "is not a folder with MLflow runs"),
        ("file:///nowhere/mlruns", "is not a folder with MLflow runs"),
    ],
)
def test_a_store_that_is_not_there_is_told_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str | None, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.db").touch()
    (problem,) = refused("list", *(["--uri", uri] if uri else [])).problems
    assert problem.what == what
    assert "--uri" in problem.allowed
    assert [path.name for path in tmp_path.rglob("*")] == ["empty.db"]
    assert (tmp_path / "empty.db").stat().st_size == 0


@pytest.mark.parametrize("uri", ["http://me:secret@127.0.0.1:9", "postgresql://me:secret@127.0.0.1:9/db"])
def test_a_server_that_does_not_answer_is_told_without_its_password(uri: str) -> None:
    error = grpox("list", "--uri", uri).exception
    assert isinstance(error, RunFailed)
    assert re.search(r"me:\*\*\*@127.* cannot be read: .*Connection refused", str(error))
    assert "secret" not in str(error)


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, though long enough to look at" * 100)
    error = grpox("list", "--uri", f"sqlite:///{tmp_path}/text.db").exception
    assert isinstance(error, RunFailed)
    assert "file is not a database" in str(error)


def test_without_mlflow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert refused("list").problems[0].what.startswith("MLflow is not installed here")


def test_a_database_of_an_older_mlflow_is_not_brought_up_to_date(stored: Stored, tmp_path: Path) -> None:
    older = tmp_path / "older.db"
    shutil.copy(stored.folder / "mlflow.db", older)
    with closing(sqlite3.connect(older)) as connection:
        connection.execute("DROP TABLE webhook_events")
    before = older.read_bytes()
    error = grpox("list", "--uri", f"sqlite:///{older}").exception
    assert isinstance(error, RunFailed)
    assert f"mlflow db upgrade sqlite:///{older}" in str(error)
    assert older.read_bytes() == before


def test_help_imports_no_mlflow() -> None:
    code = (
        "import sys\nfrom grpox.cli.app import app\n"
        "app(['runs', 'list', '--help'], standalone_mode=False)\n"
        "print({'mlflow', 'torch', 'yaml'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n"


# -- Curves ----------------------------------------------------------------------------------------------


def line(*values: float, width: int = 10, encoding: str = "utf-8") -> str:
    points = [Point(step, value, 0) for step, value in enumerate(values, 1)]
    return sparkline(Course("reward", points), width, encoding)


def test_a_curve_goes_from_its_lowest_to_its_highest_value() -> None:
    assert line(*range(8)) == BLOCKS
    assert line(5.0, -3.0) == "█▁"
    assert line(2.0, 2.0) == "▅▅"
    assert line(0.3, 0.1 + 0.2) == "▅▅"
    assert line(*range(8), encoding="ascii") == PLAIN_BLOCKS
    # Means of two neighbours: 0, 1, 0.5.
    assert line(0, 0, 1, 1, 0, 1, width=3) == "▁█▅"


def test_what_is_no_number_is_a_gap_in_a_curve() -> None:
    assert line(1.0, math.nan, 2.0) == "▁ █"
    assert line(1.0, 1.7976931348623157e308, 2.0) == "▁ █"
    assert line(math.nan) == ""


def test_the_highest_value_is_a_number_where_there_is_one() -> None:
    course = Course("loss", [Point(1, math.nan, 0), Point(2, -1.0, 0), Point(3, 4.0, 0), Point(4, 4.0, 0)])
    assert (course.highest.step, course.lowest.step) == (3, 2)
