"""Environments in TRL's form run through the adapter."""

import asyncio
import functools
import inspect
import pickle

import pytest
from support.documented import documented

from grpox.config import EpisodesConfig
from grpox.contracts import ToolCall
from grpox.environments import Appended, Environment
from grpox.environments.contract import environment_problem, overrides, tools_of
from grpox.environments.from_factory import as_environment
from grpox.environments.schemas import method_schema
from grpox.rollout.episodes.loading import load_environments
from grpox.rollout.episodes.local import LocalEnvironments
from grpox.rollout.episodes.messages import Action, EnvironmentSpec, EpisodeOutcome, Start


class Counter:
    """Counts up to a goal, in TRL's form."""

    closed = 0

    def __init__(self, goal=2):
        self.goal, self.count = goal, 0

    def reset(self, **row):
        self.goal = row.get("goal", self.goal)
        return f" Count to {self.goal}."

    @documented
    def add(self, number: int) -> str:
        self.count += number
        return str(self.count)

    @documented
    async def look(self) -> str:
        return str(self.count)

    @classmethod
    @documented
    def own_name(cls, number: int) -> str:
        return cls.__name__ * number

    @staticmethod
    @documented
    def double(number: int) -> int:
        return 2 * number

    def _hidden(self): ...

    async def get_reward(self):
        return float(self.count == self.goal)

    def close(self):
        type(self).closed += 1


def run(value):
    async def wait():
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def test_every_public_method_but_the_three_is_a_tool():
    kind = as_environment(Counter)
    assert set(tools_of(kind)) == {"add", "look", "double"}  # as TRL 1.16 finds them: functions of the class
    assert set(method_schema(kind, "double")["function"]["parameters"]["properties"]) == {"number"}
    assert environment_problem(Counter) == ""
    assert str(inspect.signature(kind.add)) == "(self, number: int) -> str"
    assert kind.add.__doc__ == Counter.add.__doc__


@pytest.mark.parametrize("target", [Counter, lambda: Counter(3)])
def test_an_episode(target):
    episode = as_environment(target)()
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


def test_reward_and_close_may_be_missing_and_the_object_alone_may_have_a_reward():
    class Quiet:
        def reset(self, **row): ...

    class Late(Counter):
        get_reward = None

        def __init__(self):
            super().__init__()
            self.get_reward = lambda: 0.5

    class Later(Quiet):
        def __init__(self):
            self.get_reward = lambda: 0.25

    for target, reward in ((Quiet, None), (Late, 0.5), (Later, 0.25), (lambda: Later(), 0.25)):
        episode = as_environment(target)()
        run(episode.reset({}, seed=0))
        assert run(episode.reward()) == reward
        run(episode.close())
    assert not overrides(as_environment(Later), "reward")  # as a class it declares none


class Named:
    """Has tools whose names are methods of `Environment`, or attributes of the adapter."""

    def reset(self, **row):
        self.log = ["reset"]

    @documented
    def reply(self, text: str) -> str:
        self.log.append(text)
        return " ".join(self.log)

    @documented
    def info(self) -> str:
        return "more"

    @documented
    async def done(self) -> str:
        return "done"

    @documented
    def inner(self) -> str:
        return "inside"

    @documented
    def factory(self) -> str:
        return "made"

    @functools.lru_cache(maxsize=3)  # noqa: B019 - as users write it
    @documented
    def seen(self, number: int) -> int:
        return number + 1

    unbound = len
    doubled = functools.partial(max, 2)


def test_tools_may_have_the_names_of_methods_of_an_environment_and_be_cached():
    answers = {
        "reply": "reset a",
        "info": "more",
        "done": "done",
        "inner": "inside",
        "factory": "made",
        "seen": "3",
    }
    plans = [EnvironmentSpec("named", "environment", Named, pickle.dumps(None))]
    (loaded,) = load_environments(plans, [])
    assert set(loaded.tools) == set(answers)
    schema = method_schema(loaded.cls, "reply")["function"]
    assert (schema["name"], list(schema["parameters"]["properties"])) == ("reply", ["text"])
    local = LocalEnvironments(plans, [], EpisodesConfig())
    local.start({0: Start(0, {}, 1)})
    arguments = {"reply": '{"text": "a"}', "seen": '{"number": 2}'}
    calls = [ToolCall(name, arguments.get(name, "{}")) for name in loaded.tools]
    answer = local.step({0: Action("", calls)})[0]
    assert {each.call.name: each.content for each in answer.results} == answers
    assert (answer.done, answer.failure) == (False, "")
    assert local.finish([0])[0] == EpisodeOutcome()  # its tool `info` is not what says more about the episode
    local.close()


def test_an_environment_stays_itself_and_a_function_may_make_one():
    class Own(Environment):
        def __init__(self, size=1):
            self.size = size

    assert as_environment(Own) is Own
    assert as_environment(lambda: Own(7))().size == 7


@pytest.mark.parametrize("target", [3, object, lambda: 3])
def test_anything_else_is_refused(target):
    with pytest.raises(TypeError, match=r"no class, and no function|has no method reset"):
        as_environment(target)
