"""The keys `environment`, `tools` and `episodes` of a run file: what they bind, and what is refused by name."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from rich.console import Console

from grpox.cli.validate import validate_report
from grpox.config import RunConfig, WhenConfig
from grpox.contracts import ToolCall
from grpox.environments import Environment
from grpox.errors import ConfigError, Problem, RunFailed
from grpox.rollout.episodes.messages import Action, Start
from grpox.runfile.data_files import EnvironmentOfRow
from grpox.runfile.environments import bound_environments, bound_tools
from grpox.runfile.load import ResolvedRun, load_run, resolve_config
from grpox.runfile.lock.of_run import lock_of
from grpox.runfile.overrides import apply_overrides
from grpox.runfile.schema import run_schema
from grpox.runfile.slots import parameter_defaults
from grpox.training.arguments import read_arguments
from grpox.training.episodes import opened_episodes

ENVIRONMENTS = '''
from pydantic import BaseModel
from grpox.environments import Environment, tool


class Lake(Environment):
    class Config(BaseModel):
        size: int = 3

    def __init__(self, config):
        self.config = config

    @tool
    def move(self, direction: str) -> str:
        """Move one step.

        Args:
            direction: up, down, left or right.
        """
        return direction

    def reward(self):
        return 1.0

    def state_key(self):
        return 0


class Silent(Environment):
    pass


class Unhinted(Environment):
    @tool
    def move(self, direction):
        """Move."""


class Other:
    pass


class NeedsConfig(Environment):
    def __init__(self, config):
        pass


class HidesAKey(Environment):
    class Config(BaseModel):
        when: int = 3


class TakesNothing(Environment):
    class Config(BaseModel):
        size: int = 3

    def __init__(self):
        pass
'''
TOOLS = '''
from functools import partial


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def search(query: str) -> str:
    """Search.

    Args:
        query: what to search for.
    """
    return query


def move(direction: str) -> str:
    """Move.

    Args:
        direction: where to.
    """
    return direction


def without_a_line(a: int) -> int:
    """Return a number."""
    return a


def of_any_number(*numbers: int) -> int:
    """Add numbers."""
    return sum(numbers)


class Counter:
    def __init__(self):
        self.count = 0

    def __call__(self, by: int) -> int:
        """Count on.

        Args:
            by: how far.
        """
        self.count += by
        return self.count


NUMBER = 3
count, add_five = Counter(), partial(add, b=5)
'''
LAKE, SILENT = {"path": "envs.py:Lake"}, {"path": "envs.py:Silent"}
BY_ENV = [
    LAKE | {"when": {"column": "env", "is": "lake"}},
    SILENT | {"when": {"column": "env", "is": "silent"}},
]
Resolve = Callable[..., ResolvedRun]
Refuse = Callable[..., list[Problem]]


@pytest.fixture
def resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """``resolve(section=..., rows=[...])``: a checked run whose files are in the working directory."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    (tmp_path / "tools.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(rows: list[Any] | None = None, given: Any = None, **sections: Any) -> ResolvedRun:
        rows = rows or [{"prompt": "1+1=", "answer": "2", "env": "lake"}] * 2
        Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config: dict[str, Any] = {
            "model": {"path": "model"},
            "data": {"path": "train.jsonl"},
            "rewards": ["exact"],
            "train": {"num_generations": 4, "per_device_train_batch_size": 4},
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


# -- What is bound ---------------------------------------------------------------------------------------


def test_an_environment_is_bound_to_its_parameters(resolve: Resolve) -> None:
    run = resolve(environment=LAKE | {"size": 4, "weight": 1})
    [bound] = bound_environments(run)
    assert (bound.label, bound.component.kind, bound.component.key) == ("Lake", "environment", "environment")
    assert bound.component.config is not None
    assert bound.component.config.model_dump() == {"size": 4}
    assert (bound.when, bound.weight, bound.given) == (None, 1.0, False)
    assert run.config.environments["environment"].path == f"{Path.cwd()}/envs.py:Lake"


def test_environments_of_one_name_have_labels_of_their_own(resolve: Resolve) -> None:
    rows = [{"prompt": "1", "answer": "1", "env": name} for name in ("lake", "big")]
    both = [
        LAKE | {"size": size, "when": {"column": "env", "is": name}} for size, name in ((3, "lake"), (8, "big"))
    ]
    run = resolve(rows, environment=both)
    assert [bound.label for bound in bound_environments(run)] == ["Lake", "Lake-2"]
    assert [bound.component.key for bound in bound_environments(run)] == ["environment[0]", "environment[1]"]


def test_tools_alone_have_a_plain_environment(resolve: Resolve) -> None:
    run = resolve(tools=["tools.py:add", "tools.py:search"])
    [bound] = bound_environments(run)
    assert (bound.label, run.registry.build(bound.component).reward()) == ("tools", None)
    tools = bound_tools(run)
    assert [tool.name for tool in tools] == ["add", "search"]
    assert tools[0].function(2, 3) == 5
    assert tools[0].reference == f"{Path.cwd()}/tools.py:add"


def test_a_run_without_them_has_none(resolve: Resolve) -> None:
    run = resolve()
    assert bound_environments(run) == bound_tools(run) == []
    assert not run.config.has_episodes


def test_the_config_of_a_run_can_be_read_again(resolve: Resolve) -> None:
    rows = [{"prompt": "1", "answer": "1", "env": value} for value in ("lake", "silent")]
    config = resolve(rows, environment=BY_ENV, tools=["tools.py:add"], episodes={"max_turns": 2}).config
    written = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))
    assert RunConfig.model_validate(written) == config
    assert written["environment"][1]["when"] == {"column": "env", "is": "silent"}


def test_the_command_line_sets_names_parameters_and_limits() -> None:
    data: dict[str, Any] = {"environment": "calculator"}
    apply_overrides(data, ["environment.size=3", "episodes.max_turns=4", "tools=[t.py:add]"])
    assert data == {
        "environment": {"name": "calculator", "size": 3},
        "episodes": {"max_turns": 4},
        "tools": ["t.py:add"],
    }
    listed: dict[str, Any] = {"environment": ["lake", "calculator"]}
    apply_overrides(listed, ["environment[1].weight=2", "environment.0.when.column=env"])
    assert listed["environment"] == [
        {"name": "lake", "when": {"column": "env"}},
        {"name": "calculator", "weight": 2},
    ]
    fresh: dict[str, Any] = {}
    apply_overrides(fresh, ["environment=calculator"])
    assert fresh == {"environment": "calculator"}


def test_a_path_of_the_command_line_begins_at_the_working_directory(resolve: Resolve) -> None:
    resolve()  # writes the files
    run = load_run("quickstart", ["environment.path=envs.py:Lake", "tools=['tools.py:add']"])
    assert run.config.environments["environment"].path == f"{Path.cwd()}/envs.py:Lake"
    assert bound_tools(run)[0].reference == f"{Path.cwd()}/tools.py:add"


def test_validate_shows_environment_and_tools(resolve: Resolve) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(validate_report(resolve(environment=LAKE | {"size": 4}, tools=["tools.py:add"])))
    lines = [line.split() for line in console.export_text().splitlines()]
    place = lines.index(["environment", "Lake", "the", "run", "file's", "path"])
    assert lines[place + 1] == ["size=4"]
    assert ["tools[0]", "add", f"{Path.cwd()}/tools.py:add"] in lines


def test_a_lock_has_the_hashes_of_environments_and_tools(resolve: Resolve) -> None:
    run = resolve(environment=LAKE, tools=["tools.py:add"])
    locked = lock_of(run).components
    assert (locked["environment"].kind, locked["tools[0]"].kind) == ("environment", "tool")
    Path("tools.py").write_text(TOOLS + "\n# changed\n")
    assert lock_of(run).components["tools[0]"].sha256 != locked["tools[0]"].sha256
    assert lock_of(run).components["environment"].sha256 == locked["environment"].sha256


def test_defaults_of_an_environment_are_known_by_its_keys() -> None:
    flat = {"environment.0.path": "envs.py:Lake", "environment.1.path": "envs.py:Lake"}
    found = parameter_defaults(flat)
    assert found["environment.1."] == {"name": None, "path": None, "when": None, "weight": 1.0}
    assert "environment." in parameter_defaults({"environment.path": "envs.py:Lake"})


def test_the_schema_takes_one_or_a_list() -> None:
    from grpox.plugins.discovery import discover
    from grpox.plugins.registry import Registry

    schema = run_schema(Registry(discover()))
    one, several = schema["properties"]["environment"]["anyOf"][0]["oneOf"]
    assert one["$ref"] == several["items"]["$ref"] == "#/$defs/environment.any"
    by_path = schema["$defs"]["environment.any"]["oneOf"][-1]["properties"]
    assert set(by_path) == {"path", "when", "weight"}
    assert schema["$defs"]["WhenConfig"]["required"] == ["column", "is"]


# -- Rows ------------------------------------------------------------------------------------------------


class Rows:
    """The part of a set of prompts that tells rows apart."""

    def __init__(self, rows: list[dict[str, Any]], stream: object = None) -> None:
        self.data, self.stream, self._rows = "the data", stream, rows
        self.column_names = list(rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self._rows]

    def rows(self, indices: list[int]) -> tuple[list[str], dict[str, list[Any]]]:
        picked = [self._rows[index] for index in indices]
        return [""] * len(picked), {name: [row[name] for row in picked] for name in self.column_names}

    def place(self, index: int) -> str:
        return f"row {index}"


def of_row(rows: list[dict[str, Any]], *values: Any, stream: object = None) -> EnvironmentOfRow:
    whens = [WhenConfig.model_validate({"column": "env", "is": value}) for value in values]
    return EnvironmentOfRow(whens, Rows(rows, stream))  # type: ignore[arg-type]


def test_each_row_has_the_environment_whose_value_it_has() -> None:
    place = of_row([{"env": "a"}, {"env": 1}, {"env": None}, {"env": "a"}], "a", 1, None)
    assert [place(row) for row in range(4)] == [0, 1, 2, 0]


def test_an_environment_for_all_rows_reads_no_column() -> None:
    place = EnvironmentOfRow([None], Rows([{"x": 1}, {"x": 2}]))  # type: ignore[arg-type]
    assert [place(0), place(1)] == [0, 0]


@pytest.mark.parametrize(("value", "wanted"), [("1", 1), (True, 1), (1, True), ("A", "a")])
def test_text_number_and_truth_are_different_values(value: Any, wanted: Any) -> None:
    with pytest.raises(ConfigError, match="row 0 belongs to no environment"):
        of_row([{"env": value}], wanted)


def test_a_row_of_a_dataset_without_environment_is_found_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        of_row([{"env": "lake"}] * 5 + [{"env": "lakes"}], "lake")
    [problem] = caught.value.problems
    assert (problem.what, problem.key) == ("row 5 belongs to no environment", "environment")
    assert (problem.given, problem.nearest) == ("env 'lakes'", "env 'lake'")


def test_a_row_of_a_stream_is_looked_at_when_it_comes() -> None:
    place = of_row([{"env": "a"}, {"env": "x"}], "a", "b", stream=object())
    assert place(0) == 0
    with pytest.raises(RunFailed, match="row 1 belongs to no environment"):
        place(1)


def test_the_rows_of_a_file_are_checked_before_anything_is_loaded(refuse: Refuse) -> None:
    rows = [{"prompt": "1", "answer": "1", "env": value} for value in ("lake", "silent", "lakes", "pond")]
    [problem] = refuse(rows, environment=BY_ENV)
    assert problem.what == "line 3 of train.jsonl belongs to no environment"
    assert (problem.given, problem.allowed) == ("env 'lakes'", "env is lake; env is silent")


def test_the_rows_of_a_parquet_file_are_checked_too(refuse: Refuse) -> None:
    rows = {"prompt": ["1", "2"], "answer": ["1", "2"], "env": ["lake", "pond"]}
    datasets.Dataset.from_dict(rows).to_parquet("t.parquet")
    alone = LAKE | {"when": {"column": "env", "is": "lake"}}
    [problem] = refuse(data={"path": "t.parquet"}, environment=alone)
    assert problem.what == "row 1 (from 0) of t.parquet belongs to no environment"


def test_a_column_that_a_file_lacks_is_told_for_each_environment(refuse: Refuse) -> None:
    rows = [{"prompt": "1", "answer": "1", "envs": "lake"}] * 2
    told = refuse(rows, environment=BY_ENV)
    assert [problem.key for problem in told] == ["environment[0].when.column", "environment[1].when.column"]
    assert {(problem.given, problem.nearest, problem.allowed) for problem in told} == {
        ("env", "envs", "answer, envs")
    }


# -- What is refused -------------------------------------------------------------------------------------


def test_two_for_the_same_rows_are_refused(refuse: Refuse) -> None:
    told = refuse(environment=[BY_ENV[0], SILENT | {"when": {"column": "env", "is": "lake"}}])
    assert ("environment[1].when", "names the same rows as environment[0]") in [(p.key, p.what) for p in told]
    assert any("belongs to environment[0] and environment[1]; a row has one" in p.what for p in told)


@pytest.mark.parametrize(
    ("environment", "key", "told"),
    [
        (
            [LAKE, BY_ENV[1]],
            "environment[0].when",
            "of several environments, each names the rows",
        ),
        ({"size": 3}, "environment", "give exactly one of 'name' and 'path'"),
        ([], "environment", "should have at least 1 item"),
        (
            ["quick", {"name": "x", "wheel": 1, "when": {"colum": "a", "is": 1}}],
            "environment[1].when.colum",
            "unknown",
        ),
        ({"path": "envs.py:Lake", "sizes": 4}, "environment.sizes", "unknown key"),
        ({"path": "envs.py:Lakes"}, "environment", "has no 'Lakes'"),
        ({"path": "envs.py:Other"}, "environment", "has no method reset"),
        ({"path": "envs.py:Unhinted"}, "environment", "no type hint for its parameter 'direction'"),
        ({"path": "envs.py:NeedsConfig"}, "environment", "is built without an argument, as it has no Config"),
        ({"path": "envs.py:TakesNothing"}, "environment", "is built with its parameters"),
        ({"path": "envs.py:HidesAKey"}, "environment", "may not use the run file's own keys when"),
        ("calculater", "environment", "no environment called 'calculater' is installed"),
    ],
)
def test_a_wrong_environment_is_told_at_its_key(refuse: Refuse, environment: Any, key: str, told: str) -> None:
    problems = {problem.key: problem for problem in refuse(environment=environment)}
    assert told in problems[key].what


@pytest.mark.parametrize(
    ("tools", "told", "near"),
    [
        (["tools.py:ad"], "has no 'ad'", "add"),
        (["tool.py:add"], "there is no file", "tools.py"),
        (["tools:add"], "a file is named with its ending, tools.py:add", ""),
        (["json:dumpz"], "json has no 'dumpz'", "dump"),
        (["add"], "does not name a function", ""),
        (["tools.py:Counter"], "tool 'Counter' is a class; give a function", ""),
        (["tools.py:without_a_line"], "has no line 'a: ...' under 'Args:'", ""),
        (["tools.py:of_any_number"], "has the variadic positional parameter 'numbers'", ""),
    ],
)
def test_a_wrong_tool_is_told_at_its_key(refuse: Refuse, tools: list[str], told: str, near: str) -> None:
    [problem] = refuse(tools=tools)
    assert (problem.key, problem.nearest) == ("tools[0]", near)
    assert told in problem.what


def test_objects_that_can_be_called_are_tools_by_the_name_that_the_run_file_has(resolve: Resolve) -> None:
    run = resolve(tools=["tools.py:count", "tools.py:add_five"])
    tools = bound_tools(run)
    assert [
        (tool.name, tool.function(**arguments))
        for tool, arguments in zip(tools, [{"by": 2}, {"a": 1}], strict=True)
    ] == [("count", 2), ("add_five", 6)]
    with opened_episodes(run) as episodes:
        episodes.environments.start({0: Start(0, {}, 1)})
        calls = [
            ToolCall("count", '{"by": 3}'),
            ToolCall("add_five", '{"a": 2}'),
            ToolCall("add_five", '{"b": 2}'),
        ]
        results = episodes.environments.step({0: Action("", calls)})[0].results
        assert [result.content for result in results[:2]] == ["3", "7"]
        assert results[2].failure == "arguments"  # b is given
        episodes.environments.finish([0])


@pytest.mark.parametrize(
    ("keys", "key", "owner"),
    [
        ({"tools": ["tools.py:add", "tools.py:add"]}, "tools[1]", "tools[0]"),
        ({"environment": LAKE, "tools": ["tools.py:move"]}, "tools[0]", "environment"),
    ],
)
def test_two_tools_of_one_name_are_refused(refuse: Refuse, keys: dict[str, Any], key: str, owner: str) -> None:
    [problem] = refuse(**keys)
    assert problem.key == key
    assert problem.what.startswith(owner)
    assert "of the same name, and the model could not tell them apart" in problem.what


def test_limits_without_episodes_have_no_effect_and_are_refused(refuse: Refuse) -> None:
    [problem] = refuse(episodes={"max_turns": 4, "max_calls": 8})
    assert (problem.key, problem.given) == ("episodes.max_turns", "4")
    assert "neither an environment nor tools" in problem.what


def test_a_turn_is_not_longer_than_its_episode(refuse: Refuse, resolve: Resolve) -> None:
    sampling = {"max_completion_length": 64}
    limits = {"max_turn_tokens": 65, "max_observation_tokens": 64}
    told = refuse(environment=LAKE, sampling=sampling, episodes=limits)
    assert [(p.key, p.given, p.allowed) for p in told] == [
        ("episodes.max_turn_tokens", "65", "1 to 64, or null"),
        ("episodes.max_observation_tokens", "64", "less than 64, or null"),
    ]
    assert resolve(environment=LAKE, sampling=sampling, episodes={"max_turn_tokens": 64})


def test_a_least_length_which_each_turn_would_have_is_refused(refuse: Refuse) -> None:
    sampling = {"max_completion_length": 64, "min_completion_length": 12}
    told = refuse(environment=LAKE, sampling=sampling, episodes={"max_turn_tokens": 8})
    assert ("sampling.min_completion_length", "12") in [(p.key, p.given) for p in told]
    evaluation = {"path": "data.jsonl", "sampling": {"min_completion_length": 2}}
    told = refuse(environment=LAKE, evaluation=evaluation)
    assert ("evaluation.sampling.min_completion_length", "2") in [(p.key, p.given) for p in told]


def test_a_weight_that_nothing_uses_is_refused(refuse: Refuse) -> None:
    [problem] = refuse(environment=LAKE | {"weight": 0.5})
    assert (problem.key, problem.given) == ("environment.weight", "0.5")
    assert "has no effect" in problem.what


def test_the_reward_of_an_environment_needs_one_that_scores(refuse: Refuse, resolve: Resolve) -> None:
    own = {"rewards": [{"name": "environment"}]}
    for sections in ({}, {"tools": ["tools.py:add"]}, {"environment": SILENT}):
        [problem] = refuse(**own, **sections)
        assert problem.key == "rewards[0]"
        assert "reward 'environment' of grpox" in problem.what
        assert "needs 'episode_reward', which nothing in this run provides; environment 'lake'" in problem.what
    assert resolve(**own, environment=LAKE | {"weight": 0.5})


def test_an_environment_in_the_form_of_trl_needs_get_reward_for_its_own_reward(
    refuse: Refuse, resolve: Resolve, tmp_path: Path
) -> None:
    mute = "class Mute:\n    def reset(self, **row):\n        return None\n"
    paid = "class Paid(Mute):\n    def get_reward(self):\n        return 1.0\n"
    late = "class Late(Mute):\n    def __init__(self):\n        self.get_reward = lambda: 1.0\n"
    made = "def make():\n    return Late()\n"
    (tmp_path / "trl_form.py").write_text(mute + paid + late + made)
    own = {"rewards": [{"name": "environment"}]}
    for name in ("Mute", "Late"):  # a class is not built before the run
        [problem] = refuse(**own, environment={"path": f"trl_form.py:{name}"})
        assert problem.key == "rewards[0]"
        assert f"environment '{name}' would, if its class had a method get_reward" in problem.what
    for name in ("Paid", "make"):
        assert resolve(**own, environment={"path": f"trl_form.py:{name}"})


def test_an_advantage_of_states_needs_an_environment_that_names_them(refuse: Refuse, resolve: Resolve) -> None:
    [problem] = refuse(environment=SILENT, advantage="gigpo")
    assert problem.key == "advantage"
    assert "needs 'state_keys', which nothing in this run provides; environment 'lake' would" in problem.what
    assert resolve(environment=LAKE, advantage="gigpo")


def test_a_generator_that_cannot_bound_turns_is_refused(refuse: Refuse) -> None:
    generator = Path("own.py")
    methods = "".join(
        f"    def {name}(self, *_): ...\n" for name in ("start", "generate", "sync", "sleep", "wake", "close")
    )
    generator.write_text(f"class Own:\n{methods}")
    [problem] = refuse(environment=LAKE, generator={"path": "own.py:Own"})
    assert problem.key == "generator"
    assert "does not provide 'max_tokens'" in problem.what
    assert problem.allowed.split(", ")[0] == "hf"


# -- From Python -----------------------------------------------------------------------------------------


class Local(Environment):
    def __init__(self, config: Any = None) -> None:
        self.config = config


def double(number: int) -> int:
    """Double a number.

    Args:
        number: what to double.
    """
    return 2 * number


def given(**arguments: Any) -> Any:
    return read_arguments(None, None, None, None, None, **arguments)


def test_a_class_and_functions_are_given_in_python(resolve: Resolve) -> None:
    run = resolve(given=given(environment=Local, tools=[double, "tools.py:add"]))
    [bound] = bound_environments(run)
    assert (bound.label, bound.given, bound.component.load()) == ("Local", True, Local)
    assert [(tool.name, tool.given) for tool in bound_tools(run)] == [("double", True), ("add", False)]
    assert lock_of(run).components["environment[0]"].given == "python"


def test_a_list_of_mappings_is_as_in_a_run_file(resolve: Resolve) -> None:
    rows = [{"prompt": "1", "answer": "1", "env": value} for value in ("lake", "silent")]
    own = [{"class": Local, "when": {"column": "env", "is": "silent"}}, BY_ENV[0]]
    run = resolve(rows, given=given(environment=own))
    assert [bound.label for bound in bound_environments(run)] == ["Local", "Lake"]
    assert [bound.given for bound in bound_environments(run)] == [True, False]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (Local(), "is an object; give its class"),
        (3, "is no class, and no function"),
        (dict, "has no method reset"),
    ],
)
def test_what_is_no_class_of_an_environment_is_told(refuse: Refuse, environment: Any, told: str) -> None:
    [problem] = refuse(given=given(environment=environment))
    assert (problem.key, problem.where) == ("environment[0]", "Run()")
    assert told in problem.what
