"""Environments in TRL's form run through the adapter."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from typing import Any

import pytest

from grpox.config import EpisodesConfig
from grpox.contracts import ToolCall
from grpox.environments import Appended, Environment, tool
from grpox.environments.contract import environment_problem, overrides, tools_of
from grpox.environments.from_factory import as_environment
from grpox.environments.schemas import method_schema
from grpox.rollout.episodes.loading import load_environments
from grpox.rollout.episodes.local import LocalEnvironments
from grpox.rollout.episodes.messages import Action, Blueprint, Outcome, Start


class Counter:
    """Counts up to a goal, in TRL's form."""

    closed = 0

    def __init__(self, goal: int = 2) -> None:
        self.goal, self.count = goal, 0

    def reset(self, **row: Any) -> str | None:
        self.goal = row.get("goal", self.goal)
        return f" Count to {self.goal}."

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: what to add.
        """
        self.count += number
        return str(self.count)

    async def look(self) -> str:
        """Look at the count."""
        return str(self.count)

    @classmethod
    def own_name(cls, number: int) -> str:
        """Say the name of the class.

        Args:
            number: how often.
        """
        return cls.__name__ * number

    @staticmethod
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: what to double.
        """
        return 2 * number

    def _hidden(self) -> None: ...

    async def get_reward(self) -> float:
        return float(self.count == self.goal)

    def close(self) -> None:
        type(self).closed += 1


def run(value: Any) -> Any:
    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def test_every_public_method_but_the_three_is_a_tool() -> None:
    kind = as_environment(Counter)
    tools = set(tools_of(kind))
    assert tools == {"add", "look", "double"}  # as TRL 1.16 finds them: functions of the class
    assert tools == {
        name
        for name, _ in inspect.getmembers(Counter, inspect.isfunction)
        if name not in ("reset", "get_reward", "close") and not name.startswith("_")
    }
    assert set(method_schema(kind, "double")["function"]["parameters"]["properties"]) == {"number"}
    assert environment_problem(Counter) == ""
    assert str(inspect.signature(kind.add)) == "(self, number: 'int') -> 'str'"  # type: ignore[attr-defined]
    assert "what to add" in str(kind.add.__doc__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("target", [Counter, lambda: Counter(3)])
def test_an_episode(target: Any) -> None:
    episode: Any = as_environment(target)()
    Counter.closed = 0
    beginning = run(episode.reset({"goal": 5, "prompt": "Hello."}, seed=1))
    assert beginning == " Count to 5."
    assert isinstance(beginning, Appended)
    assert episode.add(5) == "5"
    assert run(episode.look()) == "5"
    assert episode.double(2) == 4
    assert run(episode.reward()) == 1.0
    run(episode.close())
    assert Counter.closed == 1


def test_without_reward_and_close() -> None:
    class Quiet:
        def reset(self) -> None: ...

    episode: Any = as_environment(Quiet)()
    assert run(episode.reset({}, seed=0)) is None
    assert run(episode.reward()) is None
    run(episode.close())


def test_a_reward_that_only_the_object_has_counts() -> None:
    class Late(Counter):
        get_reward = None  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__()
            self.get_reward = lambda: 0.5  # type: ignore[assignment, method-assign]

    class Later:
        def __init__(self) -> None:
            self.get_reward = lambda: 0.25

        def reset(self, **row: Any) -> None: ...

    for target, reward in ((Late, 0.5), (Later, 0.25), (lambda: Later(), 0.25)):
        episode: Any = as_environment(target)()
        assert run(episode.reward()) == reward
    assert not overrides(as_environment(Later), "reward")  # as a class it declares none


class Named:
    """Has tools whose names are methods of `Environment`, or attributes of the adapter."""

    def reset(self, **row: Any) -> None:
        self.log = ["reset"]

    def reply(self, text: str) -> str:
        """Reply.

        Args:
            text: what to reply.
        """
        self.log.append(text)
        return " ".join(self.log)

    def info(self) -> str:
        """Say more."""
        return "more"

    async def done(self) -> str:
        """Say that it is done."""
        return "done"

    def parse(self) -> str:
        """Parse."""
        return "parsed"

    def inner(self) -> str:
        """Look inside."""
        return "inside"

    def factory(self) -> str:
        """Make."""
        return "made"

    @functools.lru_cache(maxsize=3)  # noqa: B019 - as users write it
    def seen(self, number: int) -> int:
        """Count.

        Args:
            number: how far.
        """
        return number + 1

    unbound = len
    doubled = functools.partial(max, 2)


def test_tools_may_have_the_names_of_methods_of_an_environment_and_be_cached() -> None:
    (loaded,) = load_environments([Blueprint("named", "environment", Named, pickle.dumps(None))], [])
    assert set(loaded.tools) == {"reply", "info", "done", "parse", "inner", "factory", "seen"}
    schema = method_schema(loaded.cls, "reply")["function"]
    assert (schema["name"], list(schema["parameters"]["properties"])) == ("reply", ["text"])
    local = LocalEnvironments(
        [Blueprint("named", "environment", Named, pickle.dumps(None))], [], EpisodesConfig()
    )
    local.start({0: Start(0, {}, 1)})
    arguments = {"reply": '{"text": "a"}', "seen": '{"number": 2}'}
    calls = [ToolCall(name, arguments.get(name, "{}")) for name in loaded.tools]
    answer = local.step({0: Action("", calls)})[0]
    answers = {each.call.name: each.content for each in answer.results}
    assert answers == {
        "reply": "reset a",
        "info": "more",
        "done": "done",
        "parse": "parsed",
        "inner": "inside",
        "factory": "made",
        "seen": "3",
    }
    assert (answer.done, answer.failure) == (False, "")
    assert local.finish([0])[0] == Outcome()  # its tool `info` is not what says more about the episode
    local.close()


def test_an_environment_stays_itself_and_a_function_may_make_one() -> None:
    class Own(Environment):
        def __init__(self, size: int = 1) -> None:
            self.size = size

        @tool
        def ask(self) -> str:
            """Ask."""
            return str(self.size)

    assert as_environment(Own) is Own
    made: Any = as_environment(lambda: Own(7))()
    assert made.ask() == "7"


@pytest.mark.parametrize("target", [3, object, lambda: 3])
def test_anything_else_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match=r"no class, and no function|has no method reset"):
        as_environment(target)
