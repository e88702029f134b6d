"""Data, splits, streams, output folder, rewards and lengths of a run file, as `grpox validate` sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from grpox.errors import ConfigError, Problem
from grpox.runfile.load import ResolvedRun, load_run, resolve_config
from grpox.runfile.objects import Given

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
Check = Callable[..., list[Problem]]
Resolve = Callable[..., ResolvedRun]
Refuse = Callable[..., list[Problem]]


@pytest.fixture
def resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """``resolve(section={...}, ...)``: a run of 9 prompts, two a generation batch, with changed sections."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    (tmp_path / "train.jsonl").write_text((json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n") * 9)
    (tmp_path / "r.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(data: dict[str, Any] | None = None, given: Given | None = None, **sections: Any) -> ResolvedRun:
        config: dict[str, Any] = {
            "model": {"path": "model"},
            "data": {"path": "train.jsonl"} | (data or {}),
            "rewards": ["exact"],
            "train": {"num_generations": 4, "per_device_train_batch_size": 8},
            "sampling": {"max_completion_length": 10},
            "tracking": {},
        }
        return resolve_config(config | sections, tmp_path, "test", given=given)

    return run


@pytest.fixture
def refuse(resolve: Resolve) -> Refuse:
    def run(*arguments: Any, **sections: Any) -> list[Problem]:
        with pytest.raises(ConfigError) as caught:
            resolve(*arguments, **sections)
        return caught.value.problems

    return run


# -- Hub ids ---------------------------------------------------------------------------------------------


def test_a_hub_id_stays_as_it_is_and_has_no_known_length(resolve: Resolve) -> None:
    run = resolve({"path": "openai/gsm8k", "subset": "main", "split": "train[:100]"})
    assert (run.config.data.path, run.num_prompts) == ("openai/gsm8k", None)


@pytest.mark.parametrize("path", ["dta/train.jsonl", "sets/mine"])
def test_what_has_the_suffix_of_a_file_or_a_folder_that_is_there_is_no_hub_id(
    refuse: Refuse, path: str
) -> None:
    Path("sets").mkdir()
    (problem,) = refuse({"path": path})
    assert (problem.key, problem.what) == ("data.path", "no such file")


# -- Parts of a file, streams ----------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "taken"), [("train[:4]", 4), ("train[50%:]", 5), ("train[2:4]", 2)])
def test_a_part_of_a_file_is_counted(resolve: Resolve, split: str, taken: int) -> None:
    # 50% of 9 rows: those from row 4 on (4.5, rounded to the nearest even), as datasets slices them.
    assert resolve({"split": split}).num_prompts == taken


def test_a_part_that_does_not_fill_a_generation_batch_is_refused(refuse: Refuse) -> None:
    (problem,) = refuse({"split": "train[:1]"})
    assert problem.what == "one generation batch needs 2 prompts, but the data has 1"


def test_a_stream_needs_a_number_of_steps_and_an_uncut_split(resolve: Resolve, refuse: Refuse) -> None:
    train = {"num_generations": 4, "per_device_train_batch_size": 8}
    assert [p.key for p in refuse({"streaming": True})] == ["train.max_steps"]
    assert [p.key for p in refuse({"streaming": True}, train=train | {"max_steps": 0})] == ["train.max_steps"]
    (problem,) = refuse({"streaming": True, "split": "train[:5]"}, train=train | {"max_steps": 1})
    assert (problem.key, problem.allowed) == ("data.split", "train, or streaming: false")
    assert resolve({"streaming": True}, train=train | {"max_steps": 1}).num_prompts is None


# -- What is found in files ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["n" * 300 + ".jsonl", "a\0.jsonl"])
def test_a_path_that_the_system_cannot_follow(refuse: Refuse, path: str) -> None:
    (problem,) = refuse({"path": path})
    assert problem.key == "data.path"
    assert problem.what.startswith("cannot be opened")


def test_a_column_of_several_types_is_refused_before_anything_is_loaded(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "n": "007"}\n{"prompt": "a", "n": 7}\n')
    told = 'column n has several types: a string in line 1: "007", and a number in line 2: 7'
    held_out, train = refuse({"path": "a.jsonl"}, evaluation={"path": "a.jsonl", "every": 1})
    assert {(problem.key, problem.what) for problem in (train, held_out)} == {
        ("data.path", told),
        ("evaluation.path", told),
    }


def test_columns_called_as_arguments_of_rewards_are_refused(
    refuse: Refuse, resolve: Resolve, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompts": "a", "completions": "b", "answer": "c"}\n' * 9)
    (tmp_path / "b.jsonl").write_text('{"prompts": "a", "answer": "b"}\n' * 9)
    held_out = {"path": "a.jsonl", "every": 1}
    (problem,) = refuse({"path": "b.jsonl", "prompt_column": "prompts"}, evaluation=held_out)
    assert (problem.key, problem.given) == ("evaluation.path", "completions")
    assert resolve({"path": "b.jsonl", "prompt_column": "prompts"})


def test_a_path_with_the_characters_of_patterns_is_a_name(resolve: Resolve, tmp_path: Path) -> None:
    (tmp_path / "a[1]*?.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 2)
    assert resolve({"path": "a[1]*?.jsonl"}).num_prompts == 2


def test_a_folder_is_never_suggested_for_a_file_nor_a_file_for_a_model(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "trainer.jsonl").mkdir()
    (tmp_path / "modela").write_text("")
    (problem,) = refuse({"path": "traine.jsonl"})
    assert problem.nearest == str(tmp_path / "train.jsonl")
    (problem,) = refuse(model={"path": "./modelb"})
    assert problem.nearest == str(tmp_path / "model")


def test_a_folder_named_as_the_run_file_is_said_to_be_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs.yaml").write_text("")
    with pytest.raises(ConfigError, match="is a folder, not a run file") as caught:
        load_run("runs")
    assert caught.value.problems[0].nearest == "runs.yaml"
    (tmp_path / "quickstart").mkdir()  # as `grpox recipes copy` leaves it: the recipe's name still works
    assert load_run("quickstart", ["output_dir=out"]).source == "quickstart"


# -- The output folder -----------------------------------------------------------------------------------


def test_an_output_folder_without_permission(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_all(**_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("grpox.runfile.paths.TemporaryDirectory", refuse_all)
    (problem,) = refuse(output_dir="runs/new")
    assert (problem.key, problem.what) == (
        "output_dir",
        f"cannot be written: no permission to write in {tmp_path}",
    )


def test_inputs_that_the_run_would_move_away_are_refused(refuse: Refuse, tmp_path: Path) -> None:
    model = tmp_path / "out" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for name in ("train.jsonl", "heldout.jsonl"):
        (model / name).write_text('{"prompt": "a", "answer": "b"}\n' * 9)
    problems = refuse(
        {"path": "out/model/train.jsonl"},
        model={"path": "out/model"},
        evaluation={"path": "out/model/heldout.jsonl"},
        output_dir="out",
    )
    assert [problem.key for problem in problems] == ["model.path", "data.path", "evaluation.path"]


def test_the_model_of_another_run_is_a_fine_start(resolve: Resolve, tmp_path: Path) -> None:
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "config.json").write_text("{}")
    for folder in ("out2", "out/second", "out/model/second"):
        assert resolve(model={"path": "out/model"}, output_dir=folder).config.output_dir == folder


def test_an_adapters_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_run("quickstart", [f"model.path={tmp_path}"])
    [problem] = caught.value.problems
    assert (problem.key, problem.what) == ("model.path", "is a LoRA adapter, not a whole model")
    assert "merge_and_unload" in problem.allowed


# -- Rewards, columns and lengths --------------------------------------------------------------------------


@pytest.fixture
def check(resolve: Resolve) -> Check:
    """``check(*rewards, section={...})``: the problems of a run with these rewards."""

    def problems(*rewards: Any, **sections: Any) -> list[Problem]:
        try:
            resolve(**({"rewards": list(rewards)} if rewards else {}) | sections)
        except ConfigError as error:
            return list(error.problems)
        return []

    return problems


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
def test_a_column_that_the_data_lacks(check: Check, reward: dict[str, Any], key: str) -> None:
    label = reward.get("name") or reward["path"].partition(":")[2]
    assert told(check(reward)) == [(key, needs(label, "gold"))]


def test_columns_that_need_not_be_there(check: Check) -> None:
    regex = {"name": "regex", "pattern": "a"}
    assert check(regex, {"path": "r.py:of_any"}, {"name": "length", "target": 3}, "exact") == []


def test_the_held_out_data_is_compared_with_the_rewards_that_score_it(check: Check, tmp_path: Path) -> None:
    (tmp_path / "held.csv").write_text("prompt,gold\na,b\n")
    held_out = {"path": "held.csv"}
    lacks = ("rewards[0].column", needs("exact", "answer", "the evaluation data"))
    assert told(check(evaluation=held_out)) == [lacks]
    own = held_out | {"rewards": [{"name": "exact", "column": "gold"}, {"name": "exact", "column": "godl"}]}
    (problem,) = check(evaluation=own)
    assert (problem.key, problem.nearest) == ("evaluation.rewards[1].column", "gold")


def test_columns_of_rows_given_in_python_and_of_data_that_is_not_read(check: Check) -> None:
    rows = datasets.Dataset.from_list([{"prompt": "a", "gold": "b"}] * 9)
    assert told(check(given=Given(dataset=rows))) == [("rewards[0].column", needs("exact", "answer"))]
    assert check({"name": "exact", "column": "gold"}, data={"path": "org/set"}) == []


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (
            "by_place",
            "takes 'completions' by position, and grpox gives all arguments by name",
        ),
        ("Silent", "is a class whose objects cannot be called"),
        (
            "Wants",
            "is built without an argument, as it has no Config, which its __init__ does not take: "
            "missing a required argument: 'config'",
        ),
    ],
)
def test_a_function_that_cannot_be_called(check: Check, name: str, what: str) -> None:
    assert told(check({"path": f"r.py:{name}"})) == [("rewards[0]", f"reward '{name}' {what}")]


@pytest.mark.parametrize("parts", [{}, {"text_config": {"max_position_embeddings": 30}}, {"n_positions": 30}])
def test_lengths_beyond_the_positions_of_the_model(check: Check, tmp_path: Path, parts: dict[str, Any]) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(parts or {"max_position_embeddings": 30}))
    assert check(data={"path": "train.jsonl", "max_prompt_length": 20}) == []
    (problem,) = check(data={"path": "train.jsonl", "max_prompt_length": 21})
    assert (problem.key, problem.given, problem.allowed) == ("data.max_prompt_length", "21", "at most 20")
    (problem,) = check(sampling={"max_completion_length": 30})
    assert (problem.key, problem.allowed) == ("sampling.max_completion_length", "less than 30")
    longer = {"path": "train.jsonl", "sampling": {"max_completion_length": 40}}
    (problem,) = check(evaluation=longer)
    assert problem.key == "evaluation.sampling.max_completion_length"


def test_a_model_without_positions_takes_any_length(check: Check, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text("{}")
    assert check(sampling={"max_completion_length": 10**6}) == []


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
    check: Check, sections: dict[str, Any], keys: set[str]
) -> None:
    assert {problem.key for problem in check(**sections)} == keys
