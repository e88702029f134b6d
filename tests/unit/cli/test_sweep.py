"""The grid of a sweep, and its runs in processes that only pretend to train: failures, and runs to skip."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support.logs import LoggedText
from support.patience import patient
from support.problems import problem_of
from support.services import wait_until

from grpox.cli import sweep as cli_sweep
from grpox.cli import sweep_run
from grpox.cli.sweep_grid import Trial, plan_trials, read_grid, split_values
from grpox.cli.sweep_run import Status, conclusions, last_values, train_command
from grpox.contracts import SweepResults, SweptRun
from grpox.errors import ConfigError, RunFailed
from grpox.observing.record import config_text


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-6,1e-5", ["1e-6", "1e-5"]),
        ("1e-6, 1e-5 ", ["1e-6", "1e-5"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("{name: dapo, clip_high: 0.3},grpo", ["{name: dapo, clip_high: 0.3}", "grpo"]),
        ("'a,b','c'", ["'a,b'", "'c'"]),
        ("['a]',b],c", ["['a]',b]", "c"]),
        ("don't,won't", ["don't", "won't"]),
        ("train[:1000],train[:2000]", ["train[:1000]", "train[:2000]"]),
        ("a,,b", ["a", "", "b"]),
        ("", [""]),
    ],
)
def test_commas_separate_values_but_within_quotes_and_brackets(text: str, values: list[str]) -> None:
    assert list(split_values(text)) == values


def test_the_grid_is_every_combination_the_last_axis_fastest() -> None:
    grid = read_grid(["train.learning_rate=1e-6,1e-5", "train.max_steps=3", "loss=grpo,dapo"], "0,1")
    runs = grid.runs
    assert len(runs) == 8
    assert [tuple(setting.values()) for setting, _ in runs[:3]] == [
        ("1e-6", "grpo", "0"), ("1e-6", "grpo", "1"), ("1e-6", "dapo", "0"),
    ]  # fmt: skip
    assert list(grid.axes.items())[-1] == ("train.seed", ("0", "1"))
    assert runs[0][1] == ["train.learning_rate=1e-6", "train.max_steps=3", "loss=grpo", "train.seed=0"]


def test_an_override_keeps_its_place_by_which_a_later_one_wins_and_one_seed_is_one_run() -> None:
    grid = read_grid(["loss=grpo,dapo", "loss.clip_high=0.3"], None)
    assert grid.runs[1][1] == ["loss=dapo", "loss.clip_high=0.3"]
    assert read_grid([], "7").runs == [({"train.seed": "7"}, ["train.seed=7"])]


def test_a_key_is_told_by_its_last_part_where_that_is_enough() -> None:
    grid = read_grid(["train.beta=0,1", "sampling.top_p=0.9,1", "data.path=a,b", "model.path=c,d"], None)
    assert grid.names == {
        "train.beta": "beta", "sampling.top_p": "top_p", "data.path": "data.path", "model.path": "model.path",
    }  # fmt: skip
    assert read_grid(["rewards[0].weight=1,2"], None).names == {"rewards.0.weight": "rewards.0.weight"}


@pytest.mark.parametrize(
    ("arguments", "seeds", "key", "told"),
    [
        (["train.max_steps=3"], None, "", "nothing to sweep"),
        (["train.beta=0,0.1", "train.beta=1"], None, "train.beta", "given twice"),
        (["train.seed=1,2"], "3,4", "train.seed", "given twice"),
        (["train.beta=0,0.0"], None, "train.beta", "same value twice"),
        (["train.beta=0,,1"], None, "train.beta", "is empty"),
        (["output_dir=a,b"], None, "output_dir", "cannot be swept"),
        (["rewards.0.apiKey=a,b"], None, "rewards.0.apiKey", "a secret cannot be swept"),
        (["rewards.0.url=http://a:b@c,d"], None, "rewards.0.url", "a secret cannot be swept"),
    ],
)
def test_what_makes_no_grid_is_told(arguments: list[str], seeds: str | None, key: str, told: str) -> None:
    problem = problem_of(read_grid, arguments, seeds)
    assert (problem.key, told in problem.what) == (key, True)


PRETEND = """
import json, pathlib, sys
folder, config, learnt = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.yaml").write_text(config)
with (folder / "metrics.jsonl").open("w") as file:
    for step in (1, 2):
        file.write(json.dumps({"step": step, "time": step, "metrics": {"reward": learnt * step}}) + "\\n")
if learnt < 0:
    print("it went", file=sys.stderr)
    sys.exit("wrong")
(folder / "summary.json").write_text(json.dumps({"steps": 2, "train_seconds": 61.0}))
"""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that were started; each learns its train.learning_rate."""
    names: list[str] = []

    def command(_run: str, trial: Trial, _ranks: int) -> list[str]:
        names.append(trial.name)
        learnt = str(trial.config.train.learning_rate - 2 * ("seed=1" in trial.name))
        return [sys.executable, "-c", PRETEND, str(trial.folder), config_text(trial.config), learnt]

    monkeypatch.setattr(sweep_run, "train_command", command)
    return names


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli_sweep, "follow_log_options", lambda _: None)


def sweep(folder: Path, *arguments: str, metric: str = "reward", **options: Any) -> dict[str, Any]:
    """Call the command; return the content of sweep.json."""
    cli_sweep.sweep("quickstart", ["tracking={}", *arguments], folder=folder, metric=metric, **options)
    return results(folder)


def results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return content


def test_a_sweep_is_repeated(tmp_path: Path, begun: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    kept = sweep(tmp_path / "s", "train.learning_rate=0.25,0.5,0.125")
    assert begun == ["learning_rate=0.25", "learning_rate=0.5", "learning_rate=0.125"]
    assert kept["best"] == "learning_rate=0.5"
    runs = [(run["status"], run["value"], run["steps"]) for run in kept["runs"]]
    assert runs == [("FINISHED", 0.5, 2), ("FINISHED", 1.0, 2), ("FINISHED", 0.25, 2)]
    told = capsys.readouterr().out
    assert "best: learning_rate=0.5, reward 1" in told
    (best,) = (line.split() for line in told.splitlines() if line.lstrip().startswith("*"))
    assert best[:4] == ["*", "0.5", "FINISHED", "1"]
    assert "1 min 01 s" in told
    begun.clear()
    sweep(tmp_path / "s", "train.learning_rate=0.25,0.5,0.75")
    assert begun == ["learning_rate=0.75"]
    assert "2 already complete" in capsys.readouterr().out
    # Another config is another run, even in the same folder.
    begun.clear()
    sweep(tmp_path / "s", "train.learning_rate=0.25,0.5", "train.beta=0.1")
    assert begun == ["learning_rate=0.25", "learning_rate=0.5"]


def test_one_run_may_fail(tmp_path: Path, begun: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match="2 of 4 runs did not finish"):
        sweep(tmp_path / "s", "train.learning_rate=0.25,0.5", seeds="1,0", parallel=2)
    assert sorted(begun) == [f"learning_rate={rate}_seed={seed}" for rate in ("0.25", "0.5") for seed in "01"]
    kept = results(tmp_path / "s")
    assert [run["status"] for run in kept["runs"]] == ["FAILED", "FINISHED", "FAILED", "FINISHED"]
    assert kept["best"] == "learning_rate=0.5_seed=0"
    assert "failed: learning_rate=0.25_seed=1: wrong" in capsys.readouterr().out
    assert (tmp_path / "s" / "learning_rate=0.5_seed=1.log").read_text() == "it went\nwrong\n"


def test_a_metric_that_no_run_has_is_told_with_the_nearest(tmp_path: Path, begun: list[str]) -> None:
    with pytest.raises(RunFailed, match="no run recorded a value of the metric rewrad; did you mean reward"):
        sweep(tmp_path / "s", "train.learning_rate=0.25,0.5", metric="rewrad")
    assert len(begun) == 2


def test_mean_and_spread_over_seeds_cover_finished_runs() -> None:
    def result(rate: str, seed: str, value: float | None, status: Status = "FINISHED") -> SweptRun:
        return SweptRun("", {"train.learning_rate": rate, "train.seed": seed}, status, value, 2, 1.0, "", None)

    runs = (
        result("1", "0", 0.25), result("1", "1", 0.75), result("1", "2", 9.0, "FAILED"),
        result("2", "0", 0.5), result("2", "1", None),
    )  # fmt: skip
    told, *_ = conclusions(SweepResults("run.yaml", "reward", False, runs))
    assert told == "train.learning_rate=1: reward 0.5 +- 0.35 over 2 seeds"


def test_two_sweeps_do_not_run_in_one_folder(tmp_path: Path, begun: list[str]) -> None:
    (tmp_path / "s").mkdir()
    with (
        FileLock(tmp_path / "s" / "sweep.lock"),
        pytest.raises(RunFailed, match="another process runs the sweep"),
    ):
        sweep(tmp_path / "s", "train.learning_rate=0.25,0.5")
    assert begun == []


def test_all_mistakes_are_told_before_any_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"dapoo(.|\n)*did you mean  dapo"):
        sweep(tmp_path / "s", "train.num_generations=8,7", "loss=grpo,dapoo")
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr("grpox.runtime.launch.world_size", lambda: 2)
    with pytest.raises(ConfigError, match="no launcher"):
        sweep(tmp_path / "s", "train.learning_rate=0.25,0.5")


def test_folders_are_named_after_the_setting_and_stay_when_the_grid_grows(tmp_path: Path) -> None:
    def names(*arguments: str) -> list[str]:
        _, trials = plan_trials("quickstart", read_grid(arguments, None), tmp_path, 1)
        return [trial.name for trial in trials]

    plain, of_mapping = names("loss=dapo,{name: dapo, clip_high: 0.3}")
    assert plain == "loss=dapo"
    assert of_mapping.startswith("loss=name-dapo-clip_high-0.3-")
    clash = names("sampling.stop=[a b],[a-b]")
    assert len(set(clash)) == 2
    assert names("sampling.stop=[a b],[a-b],[c]")[:2] == clash
    (long,) = {len(name) for name in names(f"tracking.mlflow.run_name={'x' * 200},{'y' * 200}")}
    assert long == 100
    grid = read_grid(["train.beta=0,0.1"], None)
    folder, trials = plan_trials("quickstart", grid, None, 1)
    assert folder == Path("runs/quickstart-sweep")
    assert trials[1].config.output_dir == "runs/quickstart-sweep/beta=0.1"
    alone = train_command("quickstart", trials[1], 1)
    assert alone[:5] == [sys.executable, "-m", "grpox", "train", "quickstart"]
    assert alone[-2:] == ["--resume", "auto"]
    assert "--nproc-per-node=2" in train_command("quickstart", trials[1], 2)


def test_the_last_values_are_read_whatever_the_end_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1, "metrics": {"reward": 0.5, "kl": "nan"}}\n'
        '{"step": 1, "time": 1, "evaluation": {"accuracy": 0.25}}\n'
        '{"step": 2, "time": 2, "metrics": {"rew'
    )
    found = last_values(tmp_path)
    assert (found["reward"], found["evaluation/accuracy"]) == (0.5, 0.25)
    assert found["kl"] != found["kl"]
    assert last_values(tmp_path / "nowhere") == {}


WAITS = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1] + ".ended").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1] + ".begun").touch()
time.sleep(600)
"""
SWEEPS = """
import sys
from grpox.cli import sweep as cli_sweep
from grpox.cli import sweep_run
from grpox.cli.app import app
from grpox.cli.errors import run_command
waits = open(sys.argv[1]).read()
sweep_run.train_command = lambda run, trial, ranks: [sys.executable, "-c", waits, str(trial.folder)]
arguments = ["sweep", "quickstart", "tracking={}", "--seeds", "0,1", "--dir", sys.argv[2], "--parallel", "2"]
sys.exit(run_command(lambda given: app(given, standalone_mode=False), arguments))
"""

FOLLOWER = """
from grpox import ComponentSpec, hookimpl
@hookimpl
def grpox_observers():
    return [ComponentSpec("follower", "grpox_follower:Follower")]
class Follower:
    heard = []
    @hookimpl
    def grpox_sweep_started(self, sweep):
        self.heard.append((sweep.source, dict(sweep.axes), sweep.runs))
        return {"HEARD": "yes"}
    @hookimpl
    def grpox_sweep_run_ended(self, results):
        self.heard.append([run.status for run in results.runs])
        raise ValueError("a tracker that fails")
    @hookimpl
    def grpox_sweep_finished(self, results, status):
        self.heard.append((status, results.best.name, results.best.run_id))
    @hookimpl
    def grpox_tracked_run(self, folder):
        return f"id of {folder.name}"
"""


def test_an_observer_is_told(tmp_path: Path, begun: list[str], make_distribution, logged: LoggedText) -> None:
    make_distribution("grpox-follower", FOLLOWER)
    arguments = ["evaluation=null", "tracking={follower: {}}", "train.learning_rate=0.25,0.5"]
    cli_sweep.sweep("quickstart", arguments, folder=tmp_path / "s", metric="reward")
    heard = sys.modules["grpox_follower"].Follower.heard
    assert heard == [
        ("quickstart", {"train.learning_rate": ("0.25", "0.5")}, 2),
        ["FINISHED", "WAITING"],
        ["FINISHED", "FINISHED"],
        ("FINISHED", "learning_rate=0.5", "id of learning_rate=0.5"),
    ]
    assert results(tmp_path / "s")["runs"][0]["run_id"] == "id of learning_rate=0.25"
    assert logged().count("a tracker that fails") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_ended_ends_its_runs(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, "-c", SWEEPS, str(tmp_path / "waits.py"), str(tmp_path / "s")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    runs = [tmp_path / "s" / f"seed={seed}" for seed in (0, 1)]
    try:
        for run in runs:
            wait_until(run.with_name(f"{run.name}.begun").exists, f"{run.name} has begun", 60, process)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=patient(60))
    finally:
        process.kill()
    for run in runs:
        wait_until(run.with_name(f"{run.name}.ended").exists, f"{run.name} has ended", 60)
    if number != signal.SIGKILL:  # nothing can be said then
        assert process.returncode == 128 + number, output
        assert "repeat the command to continue the sweep" in output
        assert [run["status"] for run in results(tmp_path / "s")["runs"]] == ["KILLED", "KILLED"]
