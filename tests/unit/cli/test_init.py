"""`grpox init` writes a run file that validates; each answer is checked when it is given."""

from __future__ import annotations

import json
import runpy
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from grpox.cli import app as cli
from grpox.cli.errors import PastTyper
from grpox.errors import ConfigError, Problem
from grpox.runfile.load import load_run

MODEL = str(resources.files("grpox.runfile.recipes") / "quickstart" / "model")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(cli.app, ["init", *arguments], input=typed)


def written(*arguments: str, typed: str = "") -> dict[str, Any]:
    """Initialise; the run file is right, as `grpox validate` would say too."""
    result = init(*arguments, typed=typed)
    assert result.exception is None, result.exception
    path = result.stdout.split("grpox validate ")[1].split()[0]
    load_run(path)
    return dict(yaml.safe_load(Path(path).read_text()))


def refused(*arguments: str, typed: str = "") -> Problem:
    error = init(*arguments, typed=typed).exception
    assert isinstance(error, ConfigError), error
    (problem,) = error.problems
    return problem


def rows(path: str, *columns: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text((json.dumps({name: f"the {name}" for name in columns}) + "\n") * 8)
    return path


def test_the_defaults_are_a_run_with_example_data_and_a_reward_to_change(here: Path) -> None:
    run = written("adding", "--yes")
    assert run["model"] == {"path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    assert (run["data"], run["rewards"]) == ({"path": "sums.jsonl"}, [{"path": "rewards.py:reward"}])
    assert run["output_dir"] == "runs/adding"
    assert run["sampling"]["max_completion_length"] == 256
    first = json.loads((here / "adding" / "sums.jsonl").read_text().splitlines()[0])
    assert first == {"prompt": "What is 10 + 3?", "answer": 13}
    reward = runpy.run_path(str(here / "adding" / "rewards.py"))["reward"]
    messages = [{"role": "assistant", "content": "It is 13."}]
    assert reward(["13", "14", messages], answer=[13, 13, 13], prompts=[]) == [1.0, 0.0, 1.0]


def test_questions_are_asked_again_until_the_answer_is_right() -> None:
    rows("train.jsonl", "prompt", "answer")
    typed = "\n".join(("nowhere", MODEL, "nowhere.jsonl", "train.jsonl", "exatc", "exact", ""))
    result = init(typed=typed)
    assert result.exit_code == 0
    problems = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert [problem.split(": ")[2] for problem in problems] == ["model.path", "data.path", "rewards[0]"]
    assert "did you mean  exact" in result.stderr
    run = yaml.safe_load(Path("run.yaml").read_text())
    assert (run["model"], run["data"]) == ({"path": MODEL}, {"path": "train.jsonl"})
    assert run["rewards"] == [{"name": "exact"}]


def test_the_prompt_column_is_asked_for_and_a_reward_that_the_data_does_not_fit_told_at_once() -> None:
    rows("train.jsonl", "question", "solution")
    run = written("--model", MODEL, typed="\nquestoin\nquestion\nexact\n")
    assert run["data"] == {"path": "train.jsonl", "prompt_column": "question"}
    assert run["rewards"] == [{"name": "exact", "column": "solution"}]
    rows("other.jsonl", "prompt", "gold")
    typed = "exact\n{name: exact, column: gold}\n"
    run = written("new", "--model", MODEL, "--data", "other.jsonl", typed=typed)
    assert run["rewards"] == [{"name": "exact", "column": "gold"}]


def test_a_column_whose_name_is_a_number_in_run_files_is_quoted_and_a_reward_may_have_parameters() -> None:
    rows("train.jsonl", "1e5", "0o7")
    columns = ("--prompt-column", "1e5", "--answer-column", "0o7")
    run = written("--model", MODEL, *columns, "--reward", "exact", "--yes")
    assert run["data"]["prompt_column"] == "1e5"
    assert run["rewards"] == [{"name": "exact", "column": "0o7"}]
    run = written(
        "new", "--model", MODEL, "--data", "example", "--reward", "{name: length, target: 20}", "--yes"
    )
    assert run["sampling"]["max_completion_length"] == 32  # of the model's 64 positions
    assert run["rewards"] == [{"name": "length", "target": 20}]


def test_paths_are_those_of_the_run_file() -> None:
    rows("data/train.jsonl", "prompt", "my answer")
    Path("scores.py").write_text("def f(completions, **columns): return [0.0] * len(completions)\n")
    options = ("--model", MODEL, "--data", "data/train.jsonl", "--reward", "scores.py:f", "--yes")
    run = written("runs", *options)
    assert run["data"] == {"path": "../data/train.jsonl"}
    assert run["rewards"] == [{"path": "../scores.py:f"}]
    assert not Path("runs/rewards.py").exists()


@pytest.mark.parametrize("column", ["answer", "right one", "text", "columns", "class", "str"])
def test_a_reward_of_ones_own_takes_the_answers_of_a_column_of_any_name(column: str) -> None:
    rows("train.jsonl", "prompt", column)
    written("--model", MODEL, "--answer-column", column, "--yes")
    reward = runpy.run_path("rewards.py")["reward"]
    assert reward(["It is 4.", "5"], **{column: [4, 4]}) == [1.0, 0.0]


def test_a_model_with_a_name_in_any_script_is_named_as_it_is_and_leaves_room_for_prompts(here: Path) -> None:
    (here / "\N{GRINNING FACE}").mkdir()
    (here / "\N{GRINNING FACE}" / "config.json").write_text('{"n_positions": 64}')
    run = written("--model", "./\N{GRINNING FACE}", "--yes")
    assert run["model"]["path"] == "./\N{GRINNING FACE}"
    assert run["sampling"]["max_completion_length"] == 32


@pytest.mark.parametrize(
    ("option", "given", "key", "near"),
    [
        ("--model", "./nowhere", "model.path", ""),
        ("--data", "trian.jsonl", "data.path", "train.jsonl"),
        ("--reward", "exatc", "rewards[0]", "exact"),
        ("--reward", "rewrads.py:f", "rewards[0]", ""),
        ("--reward", "{name: length", "", ""),
        ("--prompt-column", "promt", "data.prompt_column", "prompt"),
        ("--answer-column", "anwser", "--answer-column", "answer"),
    ],
)
def test_a_wrong_option_writes_nothing(here: Path, option: str, given: str, key: str, near: str) -> None:
    rows("train.jsonl", "prompt", "answer")
    options = {"--model": MODEL, "--data": "train.jsonl", option: given}
    problem = refused(*(word for pair in options.items() for word in pair), "--yes")
    assert problem.key == key
    assert Path(problem.nearest).name == near
    assert [path.name for path in here.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize("name", ["run.yaml", "rewards.py", "sums.jsonl"])
def test_nothing_is_overwritten(here: Path, name: str) -> None:
    Path(name).write_text("mine")
    options = ("--data", "example") if name == "sums.jsonl" else ()
    problem = refused("--model", MODEL, *options, "--yes")
    assert (problem.what, Path(problem.given).name) == ("exists already", name)
    assert name == "run.yaml" or problem.allowed.startswith(name)
    assert [(path.name, path.read_text()) for path in here.iterdir()] == [(name, "mine")]
    assert refused(name, "--model", MODEL, "--yes").given == name  # a file is no folder


def test_answers_that_are_missing_or_do_not_fit_together_leave_no_file(here: Path) -> None:
    """Two prompts are too few for a step of four."""
    assert "--yes" in refused(typed="").allowed
    assert list(here.iterdir()) == []
    Path("train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    error = init("new", "--model", MODEL, "--data", "train.jsonl", "--yes").exception
    assert isinstance(error, ConfigError)
    assert [path.name for path in (here / "new").iterdir() if path.name != "__pycache__"] == []


def test_ctrl_c_at_a_question_ends_as_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a failure with exit code 1, which is how typer ends."""

    def interrupted(*_: Any, **__: Any) -> str:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise typer.Abort from None  # as typer's own prompt

    monkeypatch.setattr(typer, "prompt", interrupted)
    assert isinstance(init().exception, PastTyper)
