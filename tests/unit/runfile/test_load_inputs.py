"""Data, splits, streams, output folder, rewards and lengths of a run file, as `grpox validate` sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.problems import refused
from support.run_checks import Runs, refused_quickstart

from grpox.errors import Problem
from grpox.runfile.load import load_run
from grpox.runfile.objects import RunObjects

REWARDS = """
def by_name(completions, gold, answer, size=3): ...
def by_place(completions, answer, /): ...
def of_any(**columns): ...
class Declares:
    reads_columns = ("gold",)
    def __call__(self, completions, **columns): ...
class Signature:
    def __call__(self, completions, gold): ...
class Silent: ...
class Wants:
    def __init__(self, config): ...
    def __call__(self, completions, **columns): ...
"""


@pytest.fixture(autouse=True)
def rewards(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(REWARDS)


def test_what_is_a_hub_id(runs: Runs) -> None:
    run = runs.resolve({"path": "openai/gsm8k", "subset": "main", "split": "train[:100]"})
    assert (run.config.data.path, run.num_prompts) == ("openai/gsm8k", None)
    Path("sets").mkdir()
    for path in ("dta/train.jsonl", "sets/mine"):
        (problem,) = runs.refused({"path": path})
        assert (problem.key, problem.what) == ("data.path", "no such file")
    for path in ("n" * 300 + ".jsonl", "a\0.jsonl"):
        (problem,) = runs.refused({"path": path})
        assert (problem.key, problem.what[:16]) == ("data.path", "cannot be opened")


@pytest.mark.parametrize(("split", "taken"), [("train[:4]", 4), ("train[50%:]", 5), ("train[2:4]", 2)])
def test_a_part_of_a_file_is_counted(runs: Runs, split: str, taken: int) -> None:
    # 50% of 9 rows: those from row 4 on (4.5, rounded to the nearest even), as datasets slices them.
    assert runs.resolve({"split": split}).num_prompts == taken
    (problem,) = runs.refused({"split": "train[:1]"})
    assert problem.what == "one generation batch needs 2 prompts, but the data has 1"


def test_a_stream_needs_a_number_of_steps_and_an_uncut_split(runs: Runs) -> None:
    train = {"num_generations": 4, "per_device_train_batch_size": 8}
    for unbounded in (train, train | {"max_steps": 0}):
        (problem,) = runs.refused({"streaming": True}, train=unbounded)
        assert problem.key == "train.max_steps"
    (problem,) = runs.refused({"streaming": True, "split": "train[:5]"}, train=train | {"max_steps": 1})
    assert (problem.key, problem.allowed) == ("data.split", "train, or streaming: false")
    assert runs.resolve({"streaming": True}, train=train | {"max_steps": 1}).num_prompts is None


def test_the_columns_of_a_file_are_checked_before_anything_is_loaded(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "n": "007"}\n{"prompt": "a", "n": 7}\n')
    told = 'column n has several types: a string in line 1: "007", and a number in line 2: 7'
    held_out, train = runs.refused({"path": "a.jsonl"}, evaluation={"path": "a.jsonl", "every": 1})
    assert {train.key, held_out.key} == {"data.path", "evaluation.path"}
    assert train.what == held_out.what == told
    # Nor may they be called as arguments of rewards.
    (tmp_path / "a.jsonl").write_text('{"prompts": "a", "completions": "b", "answer": "c"}\n' * 9)
    (tmp_path / "b.jsonl").write_text('{"prompts": "a", "answer": "b"}\n' * 9)
    held_out = {"path": "a.jsonl", "every": 1}
    (problem,) = runs.refused({"path": "b.jsonl", "prompt_column": "prompts"}, evaluation=held_out)
    assert (problem.key, problem.given) == ("evaluation.path", "completions")
    assert runs.resolve({"path": "b.jsonl", "prompt_column": "prompts"})


def test_names_of_files_and_folders(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "trainer.jsonl").mkdir()
    (tmp_path / "modela").write_text("")
    (problem,) = runs.refused({"path": "traine.jsonl"})
    assert problem.nearest == str(tmp_path / "train.jsonl")
    (problem,) = runs.refused(model={"path": "./modelb"})
    assert problem.nearest == str(tmp_path / "model")
    # The characters of patterns are those of a name.
    (tmp_path / "a[1]*?.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 2)
    assert runs.resolve({"path": "a[1]*?.jsonl"}).num_prompts == 2


def test_a_folder_of_the_run_files_name_or_of_an_adapter_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs.yaml").write_text("")
    [problem] = refused(load_run, "runs")
    assert (problem.what, problem.nearest) == ("is a folder, not a run file", "runs.yaml")
    (tmp_path / "quickstart").mkdir()  # as `grpox recipes copy` leaves it: the recipe's name still works
    assert load_run("quickstart", ["output_dir=out"]).source == "quickstart"
    (tmp_path / "adapter_config.json").write_text("{}")
    [problem] = refused_quickstart(f"model.path={tmp_path}")
    assert (problem.key, problem.what) == ("model.path", "is a LoRA adapter, not a whole model")
    assert "merge_and_unload" in problem.allowed


def test_an_output_folder_without_permission(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_all(**_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("grpox.runfile.paths.TemporaryDirectory", refuse_all)
    (problem,) = runs.refused(output_dir="runs/new")
    told = f"cannot be written: no permission to write in {tmp_path}"
    assert (problem.key, problem.what) == ("output_dir", told)


def test_inputs_that_the_run_would_move_away_are_refused(runs: Runs, tmp_path: Path) -> None:
    model = tmp_path / "out" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for name in ("train.jsonl", "heldout.jsonl"):
        (model / name).write_text('{"prompt": "a", "answer": "b"}\n' * 9)
    own, held_out = {"path": "out/model"}, {"path": "out/model/heldout.jsonl"}
    problems = runs.refused({"path": "out/model/train.jsonl"}, model=own, evaluation=held_out, output_dir="out")
    assert [problem.key for problem in problems] == ["model.path", "data.path", "evaluation.path"]
    for folder in ("out2", "out/second", "out/model/second"):
        assert runs.resolve(model=own, output_dir=folder).config.output_dir == folder


def told(problems: list[Problem]) -> list[tuple[str, str]]:
    return [(problem.key, problem.what) for problem in problems]


def needs(label: str, column: str, data: str = "the data") -> str:
    return f"reward '{label}' needs column '{column}', which {data} lacks"


JUDGE = {"name": "judge", "url": "http://h", "model": "m", "prompt": "{prompt} {gold} {completion}"}


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        ({"name": "exact", "column": "gold"}, "rewards[0].column"),
        ({"name": "math", "column": "gold"}, "rewards[0].column"),
        ({"name": "code", "column": "gold"}, "rewards[0].column"),
        ({"name": "cosine", "max_length": 3, "column": "gold"}, "rewards[0].column"),
        ({"name": "regex", "pattern": "(a)", "column": "gold"}, "rewards[0].column"),
        ({"name": "http", "url": "http://h", "columns": ["answer", "gold"]}, "rewards[0]"),
        (JUDGE, "rewards[0]"),
        ({"path": "r.py:by_name"}, "rewards[0]"),
        ({"path": "r.py:Declares"}, "rewards[0]"),
        ({"path": "r.py:Signature"}, "rewards[0]"),
    ],
)
def test_a_column_that_the_data_lacks(runs: Runs, reward: dict[str, Any], key: str) -> None:
    label = reward.get("name") or reward["path"].partition(":")[2]
    assert told(runs.refused(rewards=[reward])) == [(key, needs(label, "gold"))]
    regex = {"name": "regex", "pattern": "a"}  # as the next ones needs no column that is not there
    assert runs.resolve(rewards=[regex, {"path": "r.py:of_any"}, {"name": "length", "target": 3}, "exact"])


def test_the_held_out_data_is_compared_with_the_rewards_that_score_it(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "held.csv").write_text("prompt,gold\na,b\n")
    held_out = {"path": "held.csv"}
    lacks = ("rewards[0].column", needs("exact", "answer", "the evaluation data"))
    assert told(runs.refused(evaluation=held_out)) == [lacks]
    own = held_out | {"rewards": [{"name": "exact", "column": "gold"}, {"name": "exact", "column": "godl"}]}
    (problem,) = runs.refused(evaluation=own)
    assert (problem.key, problem.nearest) == ("evaluation.rewards[1].column", "gold")
    # Columns of rows given in Python are known, those of data that is not read are not.
    rows = datasets.Dataset.from_list([{"prompt": "a", "gold": "b"}] * 9)
    assert told(runs.refused(given=RunObjects(dataset=rows))) == [
        ("rewards[0].column", needs("exact", "answer"))
    ]
    assert runs.resolve(rewards=[{"name": "exact", "column": "gold"}], data={"path": "org/set"})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("by_place", "takes 'completions' by position"),
        ("Silent", "is a class whose objects cannot be called"),
        ("Wants", "is built without an argument, as it has no Config"),
    ],
)
def test_a_function_that_cannot_be_called(runs: Runs, name: str, what: str) -> None:
    [problem] = runs.refused(rewards=[{"path": f"r.py:{name}"}])
    assert problem.key == "rewards[0]"
    assert problem.what.startswith(f"reward '{name}' {what}")


@pytest.mark.parametrize("parts", [{}, {"text_config": {"max_position_embeddings": 30}}, {"n_positions": 30}])
def test_lengths_beyond_the_positions_of_the_model(runs: Runs, tmp_path: Path, parts: dict[str, Any]) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(parts or {"max_position_embeddings": 30}))
    assert runs.resolve({"max_prompt_length": 20})
    (problem,) = runs.refused({"max_prompt_length": 21})
    assert (problem.key, problem.given, problem.allowed) == ("data.max_prompt_length", "21", "at most 20")
    (problem,) = runs.refused(sampling={"max_completion_length": 30})
    assert (problem.key, problem.allowed) == ("sampling.max_completion_length", "less than 30")
    longer = {"path": "train.jsonl", "sampling": {"max_completion_length": 40}}
    (problem,) = runs.refused(evaluation=longer)
    assert problem.key == "evaluation.sampling.max_completion_length"
    (tmp_path / "model" / "config.json").write_text("{}")  # of no known number
    assert runs.resolve(sampling={"max_completion_length": 10**6})


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"rewards": [3, {"name": "exat"}], "data": {"path": None}}, {"rewards[0]", "rewards[1]", "data"}),
        (
            {"rewards": [{"name": "exact", "colum": "a", "weight": "b"}, "exat"]},
            {"rewards[0].weight", "rewards[1]"},
        ),
        ({"environment": [{"path": "r.py:Wants"}], "train": 3}, {"environment[0]", "train"}),
        ({"plugins": {"disable": 3}, "loss": "dapoo"}, {"plugins.disable", "loss"}),
    ],
)
def test_a_wrong_section_hides_no_mistake_of_a_component(
    runs: Runs, sections: dict[str, Any], keys: set[str]
) -> None:
    assert {problem.key for problem in runs.refused(**sections)} == keys
