"""The keys `environment`, `tools` and `episodes` of a run file: what they bind, and what is refused by name."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import datasets
import pytest
import yaml
from rich.console import Console
from support.problems import refused
from support.run_checks import Runs

from grpox.cli.validate import validate_report
from grpox.config import RunConfig, WhenConfig
from grpox.contracts import ToolCall
from grpox.environments import Environment
from grpox.errors import RunFailed
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.rollout.episodes.messages import Action, Start
from grpox.runfile.data_files import EnvironmentOfRow
from grpox.runfile.environments import bound_environments, bound_tools
from grpox.runfile.load import load_run
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


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    (tmp_path / "tools.py").write_text(TOOLS)


def named(*names: str) -> list[dict[str, str]]:
    """Make a row for each environment."""
    return [{"prompt": "1", "answer": "1", "env": name} for name in names]


# -- What is bound ---------------------------------------------------------------------------------------


def test_an_environment_is_bound_to_its_parameters_and_tools_alone_to_a_plain_one(runs: Runs) -> None:
    run = runs.resolve(environment=LAKE | {"size": 4, "weight": 1})
    [bound] = bound_environments(run)
    assert (bound.label, bound.component.kind, bound.component.key) == ("Lake", "environment", "environment")
    assert bound.component.config is not None
    assert bound.component.config.model_dump() == {"size": 4}
    assert (bound.when, bound.weight, bound.given) == (None, 1.0, False)
    assert run.config.environments["environment"].path == f"{Path.cwd()}/envs.py:Lake"
    # Those of one name have labels of their own.
    sizes = {"lake": 3, "big": 8}
    both = [LAKE | {"size": sizes[name], "when": {"column": "env", "is": name}} for name in sizes]
    several = bound_environments(runs.resolve(rows=named(*sizes), environment=both))
    assert [each.label for each in several] == ["Lake", "Lake-2"]
    assert [each.component.key for each in several] == ["environment[0]", "environment[1]"]
    without = runs.resolve()
    assert bound_environments(without) == bound_tools(without) == []
    assert not without.config.has_episodes
    # Tools alone have a plain environment.
    run = runs.resolve(tools=["tools.py:add", "tools.py:move"])
    [bound] = bound_environments(run)
    assert (bound.label, run.registry.build(bound.component).reward()) == ("tools", None)
    tools = bound_tools(run)
    assert [tool.name for tool in tools] == ["add", "move"]
    assert tools[0].function(2, 3) == 5
    assert tools[0].reference == f"{Path.cwd()}/tools.py:add"


def test_a_run_with_both_is_recorded_shown_and_locked(runs: Runs) -> None:
    sections = {"environment": BY_ENV, "tools": ["tools.py:add"], "episodes": {"max_turns": 2}}
    config = runs.resolve(rows=named("lake", "silent"), **sections).config
    written = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))
    assert RunConfig.model_validate(written) == config
    assert written["environment"][1]["when"] == {"column": "env", "is": "silent"}

    run = runs.resolve(environment=LAKE | {"size": 4}, tools=["tools.py:add"])
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(validate_report(run))
    lines = [line.split() for line in console.export_text().splitlines()]
    place = lines.index(["environment", "Lake", "the", "run", "file's", "path"])
    assert lines[place + 1] == ["size=4"]
    assert ["tools[0]", "add", f"{Path.cwd()}/tools.py:add"] in lines

    locked = lock_of(run).components
    assert (locked["environment"].kind, locked["tools[0]"].kind) == ("environment", "tool")
    Path("tools.py").write_text(TOOLS + "\n# changed\n")
    assert lock_of(run).components["tools[0]"].sha256 != locked["tools[0]"].sha256
    assert lock_of(run).components["environment"].sha256 == locked["environment"].sha256


def test_keys_of_the_command_line_of_defaults_and_of_the_schema(runs: Runs) -> None:
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
    # A path begins at the working directory.
    run = load_run("quickstart", ["environment.path=envs.py:Lake", "tools=['tools.py:add']"])
    assert run.config.environments["environment"].path == f"{Path.cwd()}/envs.py:Lake"
    assert bound_tools(run)[0].reference == f"{Path.cwd()}/tools.py:add"
    flat = {"environment.0.path": "envs.py:Lake", "environment.1.path": "envs.py:Lake"}
    found = parameter_defaults(flat)
    assert found["environment.1."] == {"name": None, "path": None, "when": None, "weight": 1.0}
    assert "environment." in parameter_defaults({"environment.path": "envs.py:Lake"})
    schema = run_schema(Registry(discover()))
    one, several = schema["properties"]["environment"]["anyOf"][0]["oneOf"]
    assert one["$ref"] == several["items"]["$ref"] == "#/$defs/environment.any"
    by_path = schema["$defs"]["environment.any"]["oneOf"][-1]["properties"]
    assert set(by_path) == {"path", "when", "weight"}
    assert schema["$defs"]["WhenConfig"]["required"] == ["column", "is"]


# -- Rows ------------------------------------------------------------------------------------------------


def of_row(values: list[Any], *wanted: Any, stream: object = None) -> EnvironmentOfRow:
    """Find the environments of rows by their column env."""
    whens = [WhenConfig.model_validate({"column": "env", "is": value}) for value in wanted]
    prompts = SimpleNamespace(
        data="the data",
        stream=stream,
        column_names=["env"],
        column=lambda name: values,
        rows=lambda indices: ([""], {"env": [values[index] for index in indices]}),
        place=lambda index: f"row {index}",
    )
    return EnvironmentOfRow(whens, prompts)  # type: ignore[arg-type]


def test_each_row_has_the_environment_whose_value_it_has() -> None:
    place = of_row(["a", 1, None, "a"], "a", 1, None)
    assert [place(row) for row in range(4)] == [0, 1, 2, 0]
    # One for all rows reads no column.
    prompts: Any = MagicMock(stream=None, column_names=["x"], __len__=lambda _: 2)
    place = EnvironmentOfRow([None], prompts)
    assert [place(0), place(1)] == [0, 0]
    # A row of a stream is looked at when it comes.
    place = of_row(["a", "x"], "a", "b", stream=object())
    assert place(0) == 0
    with pytest.raises(RunFailed, match="row 1 belongs to no environment"):
        place(1)


@pytest.mark.parametrize(("value", "wanted"), [("1", 1), (True, 1), (1, True), ("A", "a"), ("lakes", "lake")])
def test_a_row_of_a_dataset_without_environment_is_found_at_once(value: Any, wanted: Any) -> None:
    """Text, number and truth are different values."""
    [problem] = refused(of_row, [wanted] * 5 + [value], wanted)
    assert (problem.what, problem.key) == ("row 5 belongs to no environment", "environment")
    if value == "lakes":
        assert (problem.given, problem.nearest) == ("env 'lakes'", "env 'lake'")


def test_the_rows_of_a_file_are_checked_before_anything_is_loaded(runs: Runs) -> None:
    [problem] = runs.refused(rows=named("lake", "silent", "lakes", "pond"), environment=BY_ENV)
    assert problem.what == "line 3 of train.jsonl belongs to no environment"
    assert (problem.given, problem.allowed) == ("env 'lakes'", "env is lake; env is silent")
    columns = {"prompt": ["1", "2"], "answer": ["1", "2"], "env": ["lake", "pond"]}
    datasets.Dataset.from_dict(columns).to_parquet("t.parquet")
    [problem] = runs.refused({"path": "t.parquet"}, environment=BY_ENV[0])
    assert problem.what == "row 1 (from 0) of t.parquet belongs to no environment"
    # A column that is missing is told for each environment.
    rows = [{"prompt": "1", "answer": "1", "envs": "lake"}] * 2
    told = runs.refused(rows=rows, environment=BY_ENV)
    assert [problem.key for problem in told] == ["environment[0].when.column", "environment[1].when.column"]
    assert {(problem.given, problem.nearest, problem.allowed) for problem in told} == {
        ("env", "envs", "answer, envs")
    }
    # Two for the same rows.
    told = runs.refused(environment=[BY_ENV[0], SILENT | {"when": {"column": "env", "is": "lake"}}])
    assert ("environment[1].when", "names the same rows as environment[0]") in [(p.key, p.what) for p in told]
    assert any("belongs to environment[0] and environment[1]; a row has one" in p.what for p in told)


# -- What is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "key", "told"),
    [
        ([LAKE, BY_ENV[1]], "environment[0].when", "of several environments, each names the rows"),
        ({"size": 3}, "environment", "give exactly one of 'name' and 'path'"),
        ([], "environment", "should have at least 1 item"),
        (["quick", {"name": "x", "when": {"colum": "a", "is": 1}}], "environment[1].when.colum", "unknown"),
        ({"path": "envs.py:Lake", "sizes": 4}, "environment.sizes", "unknown key"),
        ({"path": "envs.py:Lakes"}, "environment", "has no 'Lakes'"),
        ({"path": "envs.py:Other"}, "environment", "has no method reset"),
        ({"path": "envs.py:Unhinted"}, "environment", "no type hint for its parameter 'direction'"),
        ({"path": "envs.py:TakesNothing"}, "environment", "is built with its parameters"),
        ({"path": "envs.py:HidesAKey"}, "environment", "may not use the run file's own keys when"),
        ("calculater", "environment", "no environment called 'calculater' is installed"),
    ],
)
def test_a_wrong_environment_is_told_at_its_key(runs: Runs, environment: Any, key: str, told: str) -> None:
    problems = {problem.key: problem for problem in runs.refused(environment=environment)}
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
def test_a_wrong_tool_is_told_at_its_key(runs: Runs, tools: list[str], told: str, near: str) -> None:
    [problem] = runs.refused(tools=tools)
    assert (problem.key, problem.nearest) == ("tools[0]", near)
    assert told in problem.what


def test_objects_that_can_be_called_are_tools_by_the_name_that_the_run_file_has(runs: Runs) -> None:
    run = runs.resolve(tools=["tools.py:count", "tools.py:add_five"])
    tools = bound_tools(run)
    assert [tool.name for tool in tools] == ["count", "add_five"]
    assert (tools[0].function(by=2), tools[1].function(a=1)) == (2, 6)
    with opened_episodes(run) as episodes:
        episodes.environments.start({0: Start(0, {}, 1)})
        asked = (("count", '{"by": 3}'), ("add_five", '{"a": 2}'), ("add_five", '{"b": 2}'))
        calls = [ToolCall(*call) for call in asked]
        results = episodes.environments.step({0: Action("", calls)})[0].results
        assert [result.content for result in results[:2]] == ["3", "7"]
        assert results[2].failure == "arguments"  # b is given
        episodes.environments.finish([0])


SAME_NAME = "of the same name, and the model could not tell them apart"
MIN, OWN_MIN = "sampling.min_completion_length", "evaluation.sampling.min_completion_length"


@pytest.mark.parametrize(
    ("sections", "key", "given", "told"),
    [
        ({"tools": ["tools.py:add", "tools.py:add"]}, "tools[1]", "add", f"tools[0]|{SAME_NAME}"),
        ({"environment": LAKE, "tools": ["tools.py:move"]}, "tools[0]", "move", f"environment|{SAME_NAME}"),
        (
            {"episodes": {"max_turns": 4, "max_calls": 8}},
            "episodes.max_turns", "4", "neither an environment nor tools",
        ),
        (
            {"environment": LAKE, "episodes": {"max_turn_tokens": 65}},
            "episodes.max_turn_tokens", "65", "1 to 64, or null",
        ),
        (
            {"environment": LAKE, "episodes": {"max_observation_tokens": 64}},
            "episodes.max_observation_tokens", "64", "less than 64, or null",
        ),
        # A least length which each turn would have.
        (
            {"environment": LAKE, "sampling": {"max_completion_length": 64, "min_completion_length": 12}},
            MIN, "12", "",
        ),
        (
            {"environment": LAKE, "evaluation": {"path": "x.jsonl", "sampling": {"min_completion_length": 2}}},
            OWN_MIN, "2", "",
        ),
        ({"environment": LAKE | {"weight": 0.5}}, "environment.weight", "0.5", "has no effect"),
        (
            {"environment": SILENT, "advantage": "gigpo"},
            "advantage", "", "needs 'state_keys', which nothing in this run provides; environment 'lake' would",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together(
    runs: Runs, sections: dict[str, Any], key: str, given: str, told: str
) -> None:
    problems = runs.refused(**{"sampling": {"max_completion_length": 64}} | sections)
    [problem] = [problem for problem in problems if problem.key == key]
    assert given in (problem.given, problem.given.rpartition(":")[2])
    for fact in told.split("|"):
        assert fact in f"{problem.what} {problem.allowed}"


def test_what_goes_together(runs: Runs) -> None:
    sampling = {"max_completion_length": 64}
    assert runs.resolve(environment=LAKE, sampling=sampling, episodes={"max_turn_tokens": 64})
    assert runs.resolve(environment=LAKE, sampling=sampling, episodes={"max_observation_tokens": 63})
    assert runs.resolve(environment=LAKE, advantage="gigpo")


def test_the_reward_of_an_environment_needs_one_that_scores(runs: Runs, tmp_path: Path) -> None:
    own = {"rewards": [{"name": "environment"}]}
    for sections in ({}, {"tools": ["tools.py:add"]}, {"environment": SILENT}):
        [problem] = runs.refused(**own, **sections)
        assert problem.key == "rewards[0]"
        assert "reward 'environment' of grpox" in problem.what
        assert "needs 'episode_reward', which nothing in this run provides; environment 'lake'" in problem.what
    assert runs.resolve(**own, environment=LAKE | {"weight": 0.5})
    mute = "class Mute:\n    def reset(self, **row):\n        return None\n"
    paid = "class Paid(Mute):\n    def get_reward(self):\n        return 1.0\n"
    late = "class Late(Mute):\n    def __init__(self):\n        self.get_reward = lambda: 1.0\n"
    made = "def make():\n    return Late()\n"
    (tmp_path / "trl_form.py").write_text(mute + paid + late + made)
    own = {"rewards": [{"name": "environment"}]}
    for name in ("Mute", "Late"):  # a class is not built before the run
        [problem] = runs.refused(**own, environment={"path": f"trl_form.py:{name}"})
        assert problem.key == "rewards[0]"
        assert f"environment '{name}' would, if its class had a method get_reward" in problem.what
    for name in ("Paid", "make"):
        assert runs.resolve(**own, environment={"path": f"trl_form.py:{name}"})


def test_a_generator_that_cannot_bound_turns_is_refused(runs: Runs) -> None:
    generator = Path("own.py")
    methods = "".join(
        f"    def {name}(self, *_): ...\n" for name in ("start", "generate", "sync", "sleep", "wake", "close")
    )
    generator.write_text(f"class Own:\n{methods}")
    [problem] = runs.refused(environment=LAKE, generator={"path": "own.py:Own"})
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


def test_classes_and_functions_are_given_in_python(runs: Runs) -> None:
    run = runs.resolve(given=given(environment=Local, tools=[double, "tools.py:add"]))
    [bound] = bound_environments(run)
    assert (bound.label, bound.given, bound.component.load()) == ("Local", True, Local)
    assert [(tool.name, tool.given) for tool in bound_tools(run)] == [("double", True), ("add", False)]
    assert lock_of(run).components["environment[0]"].given == "python"
    # A list of mappings is as in a run file.
    own = [{"class": Local, "when": {"column": "env", "is": "silent"}}, BY_ENV[0]]
    bound = bound_environments(runs.resolve(rows=named("lake", "silent"), given=given(environment=own)))
    assert [(each.label, each.given) for each in bound] == [("Local", True), ("Lake", False)]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (Local(), "is an object; give its class"),
        (3, "is no class, and no function"),
        (dict, "has no method reset"),
    ],
)
def test_what_is_no_class_of_an_environment_is_told(runs: Runs, environment: Any, told: str) -> None:
    [problem] = runs.refused(given=given(environment=environment))
    assert (problem.key, problem.where) == ("environment[0]", "Run()")
    assert told in problem.what
