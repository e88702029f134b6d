"""Loading of a command line and a run file by `grpox eval`, before anything heavy is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.problems import problem_of
from typer.testing import CliRunner

from grpox.checkpoint.folders import folder_of, write_manifest
from grpox.checkpoint.progress import Progress
from grpox.cli import app as cli
from grpox.errors import ConfigError, Problem
from grpox.runfile.load import load_run
from grpox.runfile.lock.of_run import lock_of
from grpox.training.load_evaluation import last_model, load_evaluation, named_model, own_config

RUN = """\
model: {path: base, dtype: bfloat16, lora: {r: 4}}
data: {source: no-such-component, prompt_column: question, max_prompt_length: 9}
rewards: [exact]
loss: no-such-loss
tracking: {no-such-tracker: {}}
train: {seed: 5, max_steps: 3, num_generations: 7}
sampling: {max_completion_length: 4}
evaluation: {path: heldout.jsonl, every: 2, early_stop: {metric: accuracy}}
output_dir: runs/mine
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a run file whose training could not be, a model, and the model of a run."""
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    for name in ("mine", "runs/mine/model"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(model: str, *overrides: str, run: str = "run.yaml") -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_evaluation(named_model(model), run, overrides)
    return caught.value.problems


def test_what_only_training_needs_is_not_looked_at(folder: Path) -> None:
    run = load_evaluation(named_model("mine"), "run.yaml", ["evaluation.batch_size=2"])
    config = run.config
    assert (config.model.path, config.model.dtype, config.model.lora) == (
        str(folder / "mine"),
        "bfloat16",
        None,
    )
    assert config.evaluation is not None
    assert (config.evaluation.path, config.evaluation.batch_size) == (str(folder / "heldout.jsonl"), 2)
    assert (config.data.prompt_column, config.data.max_prompt_length) == ("question", 9)
    assert (config.train.seed, config.sampling.max_completion_length, config.tracking) == (5, 4, {})
    assert "rewards[0]" in run.components


@pytest.mark.parametrize("model", ["runs/mine", "runs/mine/model"])
def test_the_model_of_a_finished_run_lies_in_its_own_output_folder(folder: Path, model: str) -> None:
    run = load_evaluation(named_model(model), "run.yaml")
    assert run.config.model.path == str(folder / "runs" / "mine" / "model")


def test_a_hub_id_is_left_as_it_is(folder: Path) -> None:
    assert load_evaluation(named_model("org/name"), "run.yaml").config.model.path == "org/name"


def test_a_model_that_is_not_there(folder: Path) -> None:
    [problem] = refused("./mien")
    assert (problem.where, problem.key, problem.nearest) == ("command line", "model.path", str(folder / "mine"))


def test_a_change_that_would_do_nothing_is_refused(folder: Path) -> None:
    given = ("train.max_steps=1", "evalution.every=3", "train.seed=1", "output_dir=x", "rewards.0.weight=2")
    problems = refused("mine", *given)
    assert [problem.key for problem in problems] == ["train.max_steps", "evalution.every", "output_dir"]
    assert problems[1].nearest == "evaluation"


def test_a_run_file_without_an_evaluation(folder: Path) -> None:
    (folder / "run.yaml").write_text(RUN.replace("evaluation: ", "plugins: {} #"))
    [problem] = refused("mine")
    assert (problem.key, problem.where) == ("evaluation", "run.yaml")
    assert "evaluation.path=" in problem.allowed
    assert "grpox eval mine CONFIG" in problem.allowed
    load_evaluation(named_model("mine"), "run.yaml", ["evaluation.path=heldout.jsonl"])


def test_what_does_take_part_is_checked_with_its_line(folder: Path) -> None:
    (folder / "run.yaml").write_text(RUN.replace("[exact]", "[exatc]").replace("every: 2", "accurcy: exact"))
    assert [(problem.where, problem.nearest) for problem in refused("mine")] == [
        ("run.yaml:3", "exact"),
        ("run.yaml:8", "accuracy"),
    ]
    (folder / "run.yaml").write_text(RUN.replace("heldout", "held-out"))
    assert [(problem.where, problem.key) for problem in refused("mine")] == [("run.yaml:8", "evaluation.path")]


# -- The run's own config --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["runs/mine", "runs/mine/", "runs/mine/model", "runs/mine/checkpoints/step-00000003"]
)
def test_a_model_of_a_run_has_the_runs_own_config(folder: Path, model: str) -> None:
    folder_of(folder / "runs" / "mine", 3).mkdir(parents=True)
    (folder / "runs" / "mine" / "config.yaml").write_text(RUN)
    assert own_config(model) == str(folder / "runs" / "mine" / "config.yaml")


@pytest.mark.parametrize(
    ("model", "what", "near"),
    [
        ("mine", "is not of a run", "runs/mine"),
        ("org/name", "no such folder", ""),
        ("runs/mien", "no such", "runs/mine"),
    ],
)
def test_a_model_of_no_run_needs_a_run_file(folder: Path, model: str, what: str, near: str) -> None:
    (folder / "runs" / "mine" / "config.yaml").write_text(RUN)
    problem = problem_of(own_config, model)
    assert (problem.key, problem.given, problem.nearest) == ("MODEL", model, near)
    assert what in problem.what
    assert f"grpox eval {model} CONFIG" in problem.allowed


def test_the_last_model_of_a_run_is_its_model_else_its_newest_checkpoint(folder: Path) -> None:
    run = folder / "runs" / "mine"
    (run / "config.yaml").write_text(RUN)
    for step in (3, 20):
        folder_of(run, step).mkdir(parents=True)
    assert last_model("runs/mine") == "runs/mine"
    shutil.rmtree(run / "model")
    assert last_model("runs/mine") == "runs/mine/checkpoints/step-00000020"
    assert last_model("mine") == "mine"


# -- Checkpoints -----------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(folder: Path) -> Path:
    """A checkpoint without weights, of a run that began with the quickstart's model."""
    run = load_run("quickstart", ["evaluation=null", "model.dtype=bfloat16"])
    made = folder_of(folder / "runs" / "other", 3)
    made.mkdir(parents=True)
    Progress(
        step=3,
        world_size=1,
        num_tokens=0,
        seconds=0.0,
        evaluation_before={},
        metrics={},
        metrics_bytes=0,
        config=run.config.model_dump(mode="json"),
        data={},
        lock=lock_of(run),
    ).write(made)
    write_manifest(made)
    return made


def test_a_checkpoint_names_the_model_it_began_with(folder: Path, checkpoint: Path) -> None:
    named = named_model(str(checkpoint))
    assert named.checkpoint == checkpoint
    (folder / "run.yaml").write_text(RUN.replace("bfloat16", "float32"))
    config = load_evaluation(named, "run.yaml").config
    assert config.model.path == load_run("quickstart").config.model.path
    assert config.model.dtype == "bfloat16"  # as its weights were trained


def test_a_run_without_a_model_yet_names_its_checkpoints(folder: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model yet(?s:.*)step-00000003"):
        named_model("runs/other")


def test_a_damaged_checkpoint_is_told(folder: Path, checkpoint: Path) -> None:
    (checkpoint / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a damaged checkpoint: run\.json cannot be read"):
        named_model(str(checkpoint))


# -- The command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "path", "told"),
    [("--out", "mine", "Is a directory"), ("--completions", "run.yaml/x.parquet", "Not a directory")],
)
def test_a_file_that_cannot_be_written_is_told_at_once(folder: Path, option: str, path: str, told: str) -> None:
    result = CliRunner().invoke(cli.app, ["eval", "mine", "run.yaml", option, path])
    assert isinstance(result.exception, ConfigError)
    assert (result.exception.problems[0].key, told in str(result.exception)) == (option, True)


def test_a_mistake_is_told_without_torch_and_without_a_traceback(folder: Path) -> None:
    shutil.rmtree(folder / "mine")
    command = [sys.executable, "-X", "importtime", "-m", "grpox", "eval", "mine", "run.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: command line: model.path: no such folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.endswith(("| torch", "| transformers"))]
