"""`grpox runs` reads the folders of runs alone."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.contexts import config_of, context_of
from support.frozen import frozen_in
from typer.testing import CliRunner

from grpox.cli import app as cli
from grpox.errors import ConfigError
from grpox.observing.record import LocalRecord
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.runtime.run_lock import hold
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.link import RunLink
from grpox_mlflow.naming import flattened
from grpox_mlflow.views import BLOCKS, PLAIN_BLOCKS, changed_params, landmarks, sparkline

CONFIG: dict[str, Any] = {
    "rewards": [{"name": "exact", "column": "answer"}],
    "train": {"max_steps": 3, "seed": 7},
}


def record_of(folder: Path, rewards: tuple[float, ...], error: BaseException | None = None) -> None:
    """Record a run as a training does; it has ended unless it lacks a step."""
    run = replace(context_of(folder, 3, 2, **CONFIG), git_commit="abc123")
    record = LocalRecord()
    record.grpox_run_started(run)
    record.grpox_evaluated(0, {"accuracy": 0.125})
    for step, reward in enumerate(rewards, 1):
        record.grpox_step_finished(step, {"reward": reward, "grad_norm": 1.0})
    if error is not None:
        record.grpox_run_failed(run, error)
    elif len(rewards) == 3:
        record.grpox_evaluated(3, {"accuracy": 0.875})
        (folder / "summary.json").write_text('{"steps": 3}')
        (folder / "report.html").write_text("<p>3 steps")


def track(folder: Path, start: int, run_id: str | None, name: str = "", **tags: str) -> None:
    """Write what the plugin for MLflow leaves in the folder."""
    params = {**config_of(**CONFIG).model_dump(mode="json"), "run": {"total_steps": 3}}
    config = MlflowConfig(experiment="adding", tags=tags)
    link = RunLink.begin(folder, "http://me:***@host:5000", config, name or folder.name, flattened(params), {})
    replace(link, start_time=start, run_id=run_id, experiment_id="4").write(folder)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with three runs, one of them in a sweep's folder; one is not called by its folder."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    record_of(runs / "a", (0.25, 0.75, 0.5))
    track(runs / "a", 1_000_000, "3f2a91c0" * 4, name="first", team="maths")
    record_of(runs / "b", (0.25,), ValueError("odd"))
    track(runs / "b", 2_000_000, None)
    record_of(runs / "grid" / "seed=1", (0.5, 0.125))
    os.utime(runs / "grid" / "seed=1" / "versions.json", (3_000, 3_000))
    # Neither the folders of a run nor hidden ones are searched.
    record_of(runs / "a" / "earlier" / "old", (1.0,))
    record_of(runs / ".hidden", (1.0,))
    return tmp_path


def grpox(*arguments: str, width: int = 200) -> Result:
    return CliRunner().invoke(cli.app, ["runs", *arguments], env={"COLUMNS": str(width)})


def output(*arguments: str, width: int = 200) -> str:
    result = grpox(*arguments, width=width)
    assert result.exception is None, result.exception
    return result.stdout


def narrow(text: str) -> list[str]:
    """The lines of a table or page, with two spaces between columns."""
    return [re.sub(r" {2,}", "  ", line.strip()) for line in text.splitlines()]


def refused(*arguments: str) -> ConfigError:
    error = grpox(*arguments).exception
    assert isinstance(error, ConfigError), error
    return error


def objects(*arguments: str) -> Any:
    return json.loads(output(*arguments, "--json"))


def test_the_list_has_the_runs_below_the_folder_the_newest_first() -> None:
    rows = [line.split("  ") for line in narrow(output("list")) if "runs/" in line]
    assert [row[0] for row in rows] == ["seed=1", "b", "first"]
    by_name = {row[0]: row for row in rows}
    assert by_name["first"][1] == "FINISHED"
    assert by_name["first"][-4:] == ["3/3", "0.5", "accuracy 0.125 -> 0.875", "runs/a"]
    assert by_name["b"][-4:] == ["1/3", "0.25", "accuracy 0.125", "runs/b"]
    # Without MLflow the run file names the number of steps.
    assert by_name["seed=1"][-4:] == ["2/3", "0.125", "accuracy 0.125", "runs/grid/seed=1"]
    assert [run["status"] for run in objects("list")] == ["KILLED", "FAILED", "FINISHED"]


def test_the_list_can_be_narrowed_down(tmp_path: Path) -> None:
    def names(*arguments: str) -> list[str]:
        return [run["name"] for run in objects("list", *arguments)]

    assert names("--last", "1") == names("runs/grid") == ["seed=1"]
    assert (names("--status", "failed"), names("runs/a")) == (["b"], ["first"])
    assert names("runs/grid", "--status", "finished") == []
    (tmp_path / "empty").mkdir()
    assert output("list", "empty").startswith(f"no such run in {tmp_path}/empty")
    assert refused("list", "nowhere").problems[0].what == "no such folder"
    (problem,) = refused("list", "--status", "finishd").problems
    assert (problem.key, problem.given, problem.nearest) == ("--status", "finishd", "FINISHED")


def test_files_of_others_hide_no_run_and_a_run_in_progress_is_running(here: Path) -> None:
    (here / "config.yaml").write_text("{}")
    (here / "mlflow.json").write_text("{}")
    (here / "runs" / "b" / "metrics.jsonl").unlink()
    (here / "runs" / "b" / "metrics.jsonl").mkdir()
    assert [(run["name"], run["steps"]) for run in objects("list")] == [("seed=1", 2), ("b", 0), ("first", 3)]
    # The process of a run in progress has the lock of its folder; a reader takes it away from nobody.
    with hold(here / "runs" / "grid" / "seed=1"):
        (run,) = objects("list", "runs/grid")
        assert (run["status"], run["ended"]) == ("RUNNING", None)
    (run,) = objects("list", "runs/grid")
    assert (run["status"], run["ended"] is None) == ("KILLED", False)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_list_and_the_page_of_a_run_cut_nothing_in_a_terminal_of_any_width(width: int) -> None:
    listed = output("list", width=width)
    assert not re.search(r"…|\\n", listed)  # a cell of two lines is not one with an escape
    shown = output("show", "a", width=width)
    assert all(len(line) <= width for line in (listed + shown).splitlines())
    lines = narrow(shown)
    for line in ("team  maths", "steps  3 of 3", "train.seed  7", "folder  runs/a"):
        assert line in lines
    lowest = "0.25 at 1  " if width == 200 else ""
    assert f"reward  0.25  0.5  {lowest}0.75 at 2  ▁█▅" in lines
    assert f"first  {'3f2a91c0' * 4}  FINISHED" in lines


def test_a_name_that_means_no_run_or_several_is_refused(here: Path) -> None:
    (problem,) = refused("show", "firts").problems
    assert (problem.key, problem.given, problem.nearest) == ("RUN", "firts", "first")
    assert "grpox runs list" in problem.allowed
    assert refused("show", "3f2a91c0").problems[0].what == "no such run here"  # an id is for MLflow
    record_of(here / "other" / "b", (1.0,))
    (problem,) = refused("show", "b").problems
    assert problem.what == "means 2 runs"
    assert "other/b (KILLED" in problem.allowed
    assert "runs/b (FAILED" in problem.allowed


def test_a_run_is_shown_with_its_settings_values_and_files() -> None:
    for spelling in ("runs/a/", "first", "a"):
        assert objects("show", spelling)["run_id"] == "3f2a91c0" * 4
    shown = objects("show", "runs/a")
    assert shown["params"] == ALWAYS | {"train.max_steps": "3", "train.seed": "7"}
    assert shown["tags"]["team"] == "maths"
    assert shown["metrics"]["reward"] == {
        "first": {"step": 1, "value": 0.25},
        "last": {"step": 3, "value": 0.5},
        "lowest": {"step": 1, "value": 0.25},
        "highest": {"step": 2, "value": 0.75},
    }
    assert list(shown["metrics"]) == ["reward", "grad_norm", "evaluation/accuracy"]
    assert shown["artifacts"]["report.html"] is None
    assert shown["artifacts"]["earlier"] == 1
    params = objects("show", "runs/a", "--all")["params"]
    assert (params["train.beta"], params["run.total_steps"]) == ("0.0", "3")
    page = narrow(output("show", "runs/b"))
    assert "ended by  ValueError: odd" in page
    assert page[0].startswith("b  FAILED")


def test_a_changed_setting_of_a_resumed_run_counts_and_control_characters_are_escaped(here: Path) -> None:
    changes = {"train.learning_rate": "1e-06 -> 0.5 after step 1", "run.total_steps": "3 -> 8 after step 1"}
    changed = {f"changed.{key}": text for key, text in changes.items()}
    track(here / "runs" / "b", 2_000_000, None, team="\x1b]0;x\x07", **changed)
    page = output("show", "runs/b")
    assert re.search(r"resumed with\s+train.learning_rate +1e-06 -> 0.5 after step 1\s", page)
    assert r"\x1b]0;x\x07" in page
    assert [run["total_steps"] for run in objects("list", "--status", "failed")] == [8]
    assert "resumed with" not in output("show", "runs/a")


def test_a_run_without_mlflow_has_the_same_page_and_its_first_start(tmp_path: Path) -> None:
    """The record of a resume keeps the start that the record before it has."""
    page = narrow(output("show", "seed=1"))
    assert page[0].startswith("seed=1  KILLED")
    lines = {"steps  2 of 3", "run file  run.yaml", "git commit  abc123", "train.seed  7"}
    assert lines <= set(page)
    assert re.search(r"started  1970-01-01 \d\d:50, took ", "\n".join(page))
    folder = tmp_path / "runs" / "timed"
    run = replace(context_of(folder, 3, 2, **CONFIG), started=1_000.5)
    LocalRecord().grpox_run_started(run)
    LocalRecord().grpox_run_started(replace(run, resumed_at=0, started=5_000.0))
    (folder / "summary.json").write_text('{"steps": 3}')
    os.utime(folder / "summary.json", (1_042.5, 1_042.5))
    shown = objects("show", "timed")
    assert (shown["started"], shown["seconds"]) == ("1970-01-01T00:16:40.500000+00:00", 42.0)


def test_runs_are_compared_by_parameters_that_differ_and_by_their_values(here: Path) -> None:
    compared = objects("compare", "a", "seed=1", "--metric", "reward")
    last = [course["last"]["value"] for course in compared["metrics"]["reward"].values()]
    assert (last, compared["params"]) == ([0.5, 0.125], {})
    assert refused("compare", "a", "runs/a").problems[0].what == "is given twice"
    assert grpox("compare", "a").exit_code == 2
    (problem,) = refused("compare", "a", "b", "--metric", "rewards").problems
    assert (problem.key, problem.given, problem.nearest) == ("--metric", "rewards", "reward")
    config = here / "runs" / "grid" / "seed=1" / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 1.0e-06", "learning_rate: 0.5"))
    compared = objects("compare", "seed=1", "a")
    assert compared["params"]["train.learning_rate"] == {str(config.parent): "0.5", "3f2a91c0" * 4: "1e-06"}
    assert [run["name"] for run in compared["runs"]] == ["seed=1", "first"]
    lines = narrow(output("compare", "a", "seed=1"))
    for line in ("train.learning_rate  1e-06  0.5", "reward, last  0.5  0.125", "highest  0.75 at 2  0.5 at 1"):
        assert line in lines


def test_copies_of_a_tracked_folder_are_two_runs(here: Path) -> None:
    shutil.copytree(here / "runs" / "a", here / "copy")
    with (here / "copy" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time": 4.5, "metrics": {"reward": 0.0625}}\n')
    compared = objects("compare", "runs/a", "copy", "--metric", "reward")
    last = {name: course["last"]["value"] for name, course in compared["metrics"]["reward"].items()}
    assert last == {str(here / "runs" / "a"): 0.5, str(here / "copy"): 0.0625}
    assert re.search(r"runs/a(.|\n)*copy", output("compare", "runs/a", "copy"))


def test_the_last_line_of_a_step_counts_wherever_it_stands_in_the_file(here: Path) -> None:
    folder = here / "runs" / "a"
    lines = [(4, "metrics", 0.5), (5, "metrics", 0.25), (4, "metrics", 0.125)]
    # More evaluations than the part of the file that is read first.
    lines += [(step, "evaluation", step / 8192) for step in range(4, 4096)]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": step, "time": 9.5, kind: {"reward": value}}) + "\n"
            for step, kind, value in lines
        )
        file.write('{"step": 6, "ti\n{"step": 6, "ti')  # its processes were killed
    assert (folder / "metrics.jsonl").stat().st_size > 1 << 17
    shown = objects("show", "runs/a")["metrics"]
    assert shown["reward"]["last"] == {"step": 5, "value": 0.25}
    assert shown["reward"]["lowest"] == {"step": 4, "value": 0.125}
    assert shown["evaluation/accuracy"]["last"] == {"step": 3, "value": 0.875}
    (listed,) = [run for run in objects("list") if run["name"] == "first"]
    assert (listed["steps"], listed["reward"]) == (4, 0.125)  # of the last line, as a run resumed


def test_runs_are_compared_on_a_page(here: Path) -> None:
    assert output("compare", "a", "seed=1", "--html", "pages/both.html").endswith("\npages/both.html\n")
    frozen = frozen_in((here / "pages" / "both.html").read_text())
    assert [run["name"] for run in frozen["runs"]] == ["a", "seed=1"]
    metrics = frozen["answers"]["metrics"]
    assert metrics["a"]["series"]["reward"] == [[1, 2, 3], [0.25, 0.75, 0.5]]
    assert metrics["seed=1"]["series"]["reward"] == [[1, 2], [0.5, 0.125]]
    assert frozen["answers"]["compare"]["keys"] == []
    result = grpox("compare", "a", "seed=1", "--json", "--html", "both.html")
    assert json.loads(result.stdout)["runs"]
    assert result.stderr == "both.html\n"
    whats = {"runs": "is a folder: name a file", "both.html/page.html": "cannot be written: File exists"}
    for target, what in whats.items():
        (problem,) = refused("compare", "a", "b", "--html", target).problems
        assert (problem.key, problem.what) == ("--html", what)


def test_open_shows_the_report_and_the_page(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)) or True)
    page = f"#/experiments/4/runs/{'3f2a91c0' * 4}"
    run, report = output("open", "a", "--no-browser").splitlines()
    assert (run, report) == (f"run:    http://me:***@host:5000/{page}", "report: runs/a/report.html")
    assert output("open", "seed=1") == "report: no report.html here\n"
    own = here / "runs" / "grid" / "seed=1" / "report.html"
    own.touch()
    output("open", "seed=1")
    output("open", "a")
    assert opened == [own.as_uri(), f"http://me:***@host:5000/{page}"]
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    record = here / "runs" / "a" / "mlflow.json"
    record.write_text(record.read_text().replace("http://me:***@host:5000", f"sqlite:///{here}/mlflow.db"))
    result = grpox("open", "a")
    assert result.stdout.splitlines() == [
        "serve:  mlflow ui --backend-store-uri sqlite:///mlflow.db",
        f"run:    http://127.0.0.1:5000/{page}",
        "report: runs/a/report.html",
    ]
    assert (result.exit_code, result.stderr) == (0, "there is no browser to open here\n")


READS = (["list"], ["show", "runs/a"], ["compare", "runs/a", "runs/b"], ["open", "a", "--no-browser"])


def test_reading_imports_neither_mlflow_nor_torch_and_writes_nothing(here: Path) -> None:
    code = (
        f"import sys\nfrom grpox.cli.app import app\nfor read in {READS}:\n"
        "    app(['runs', *read], standalone_mode=False)\n"
        "print({'mlflow', 'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules), file=sys.stderr)"
    )
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n"
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(discover())


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
        (
            {"model": {"path": "m", "chat_template_kwargs": {"a": True}}},
            {"model.chat_template_kwargs.a": "True"},
        ),
    ],
)
def test_defaults_are_no_changes(registry: Registry, sections: dict[str, Any], changed: dict[str, str]) -> None:
    config = config_of(**{**CONFIG, "loss": "dapo", "train": {}, **sections})
    assert changed_params(dict(flattened(config.model_dump(mode="json"))), registry) == ALWAYS | changed


def line(*values: float, width: int = 10, encoding: str = "utf-8") -> str:
    return sparkline(dict(enumerate(values, 1)), width, encoding)


def test_a_curve_goes_from_its_lowest_to_its_highest_value_with_gaps_for_what_is_no_number() -> None:
    assert line(*range(8)) == BLOCKS
    assert line(5.0, -3.0) == "█▁"
    assert line(2.0, 2.0) == line(0.3, 0.1 + 0.2) == "▅▅"
    assert line(*range(8), encoding="ascii") == PLAIN_BLOCKS
    # Means of two neighbours: 0, 1, 0.5.
    assert line(0, 0, 1, 1, 0, 1, width=3) == line(math.nan, 0, 1, math.nan, 0, 1, width=3) == "▁█▅"
    assert line(1.0, math.nan, 2.0) == line(1.0, 1.7976931348623157e308, 2.0) == "▁ █"
    assert line(math.nan) == ""
    points = landmarks({1: math.nan, 2: -1.0, 3: 4.0, 4: 4.0})
    assert (points["highest"], points["lowest"]) == ((3, 4.0), (2, -1.0))
