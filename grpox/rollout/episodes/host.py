"""One instance of an environment, from its building to its end."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpox.contracts import Message, ToolCall
from grpox.environments import Appended, Environment
from grpox.environments.calling import Settled, TimeLimit, Work, begin_call, call
from grpox.environments.contract import overrides
from grpox.environments.tools import Toolbox, clean_text
from grpox.errors import brief, describe
from grpox.plugins.component_state import NotPlain
from grpox.rollout.episodes.loading import EnvironmentClass
from grpox.rollout.episodes.messages import Action, EpisodeOutcome, Observation, Stage, Start
from grpox.rollout.episodes.plain_values import number, plain_value, state_text

OWN_FOLDERS = {Path(__file__).parent, Path(call.__code__.co_filename).parent}
"""Folders of grpox's own code, whose lines no message names."""


class Failed(Exception):
    """Raised where a method of the environment failed; the text says how and where."""


PROBLEMS = (Failed, NotPlain)
"""Failures of an environment."""


class Host:
    """Calls one instance of an environment; each method is `Work`, see `grpox.environments.calling`.

    Args:
        environment_class: class of the instance.
        max_calls: most calls of tools in one turn.
        seconds: time limit of a call, for texts.
        limit: enforces it for calls that are not async.
    """

    def __init__(
        self, environment_class: EnvironmentClass, max_calls: int, seconds: float, limit: TimeLimit
    ) -> None:
        self._class = environment_class
        self._max_calls, self._seconds, self._limit = max_calls, seconds, limit
        self._instance: Environment | None = None
        """None before it is built and after it is closed."""
        self._actions = 0

    def answer(self, kind: Stage, message: Any) -> Work[Observation | EpisodeOutcome]:
        """Follow one request."""
        if kind == Stage.CLOSE:
            return EpisodeOutcome(failure=(yield from self.close()))
        if kind == Stage.FINISH:
            return (yield from self._finish())
        try:
            return (yield from self._start(message) if kind == Stage.START else self._step(message))
        except PROBLEMS as problem:
            return Observation(failure=str(problem))

    def _start(self, start: Start) -> Work[Observation]:
        self._instance = yield from self._value(self._class.build, "__init__")
        reset = self._instance.reset
        returned = yield from self._value(lambda: reset(start.row, start.seed), "reset")
        return self._observation(content=_content(returned, "reset"))

    def _step(self, action: Action) -> Work[Observation]:
        """Give the environment a turn of the model."""
        self._actions += 1
        instance = self._open_instance()
        if calls := self._calls(instance, action):
            box = Toolbox(self._class.tools, instance, self._max_calls, self._seconds, self._limit)
            results = yield from box.run(calls)
            return self._observation(results=results)
        if not overrides(type(instance), "reply"):
            return self._observation()
        returned = yield from self._value(lambda: instance.reply(action.text), "reply")
        return self._observation(returned is None, content=_content(returned, "reply"))

    def _finish(self) -> Work[EpisodeOutcome]:
        """Ask for the outcome of the episode, and close the instance."""
        failures: list[str] = []
        answers: dict[str, Any] = {}
        checks: Mapping[str, Callable[[Any], Any]] = {
            "reward": _rewards,
            "turn_rewards": self._turn_rewards,
            "info": _info,
        }
        for name, check in checks.items() if self._instance is not None else ():  # else it could not be built
            try:
                returned = yield from self._value(getattr(self._instance, name), name)
                answers[name] = check(returned)
            except PROBLEMS as problem:
                failures.append(str(problem))
        failures.append((yield from self.close()))
        rewards, turn_rewards = answers.get("reward"), answers.get("turn_rewards", ())
        return EpisodeOutcome(rewards, turn_rewards, answers.get("info", {}), "; ".join(filter(None, failures)))

    def close(self) -> Work[str]:
        """Close the instance, the first time this is called; return its failure, or an empty text."""
        instance, self._instance = self._instance, None
        if instance is None:
            return ""
        try:
            yield from self._value(instance.close, "close")
        except Failed as failure:
            return str(failure)
        return ""

    def _open_instance(self) -> Environment:
        if self._instance is None:
            raise Failed("was not built, or is closed")
        return self._instance

    def _calls(self, instance: Environment, action: Action) -> Sequence[ToolCall]:
        """Return the calls of a turn: those that the environment reads itself come first."""
        parsed = None
        if overrides(type(instance), "parse"):
            parsed = self._immediate(lambda: instance.parse(action.text), "parse")
        if parsed is None:
            return action.calls or ()
        if not isinstance(parsed, list | tuple) or not all(
            isinstance(each, ToolCall) and isinstance(each.name, str) and isinstance(each.arguments, str)
            for each in parsed
        ):
            raise Failed(f"parse returned {_brief(parsed)}, not a list of ToolCall with JSON text as arguments")
        return parsed

    def _observation(self, is_over: bool = False, **fields: Any) -> Observation:
        instance = self._open_instance()
        try:
            done = bool(instance.done) or is_over
        except Exception as error:
            raise Failed(f"raised {describe(error)} in done{_place(error)}") from error
        key = None
        if not done and overrides(type(instance), "state_key"):
            key = self._immediate(lambda: _state(instance), "state_key")
        return Observation(done=done, state_key=key, **fields)

    def _turn_rewards(self, returned: Any) -> tuple[float | None, ...]:
        place = "what turn_rewards returned"
        if isinstance(returned, str | Mapping) or not hasattr(returned, "__iter__"):
            raise NotPlain(f"{place} is a {type(returned).__name__}, not a list of numbers")
        rewards = tuple(
            None if reward is None else number(reward, f"turn_rewards[{turn}]")
            for turn, reward in enumerate(returned)
        )
        if rewards and len(rewards) != self._actions:
            raise NotPlain(f"{place} has {len(rewards)} numbers for {self._actions} turns of the model")
        return rewards

    def _value(self, method: Callable[[], Any], name: str) -> Work[Any]:
        """Call a method of the environment and return its value; raises Failed."""
        settled = yield from call(method, name, self._limit)
        return self._checked(settled, name)

    def _immediate(self, method: Callable[[], Any], name: str) -> Any:
        """Call a method that is not async; raises Failed, or NotPlain."""
        settled = begin_call(method, name, self._limit)
        if inspect.iscoroutine(settled.value):
            settled.value.close()
            raise Failed(f"{name} must not be async")
        if isinstance(settled.error, NotPlain):
            raise settled.error
        return self._checked(settled, name)

    def _checked(self, settled: Settled, name: str) -> Any:
        if settled.is_late:
            raise Failed(f"took longer than {self._seconds:g} s in {name}")
        if isinstance(settled.error, SystemExit | KeyboardInterrupt):
            raise settled.error  # meant for the process
        if settled.error is not None:
            raise Failed(f"raised {describe(settled.error)} in {name}{_place(settled.error)}")
        return settled.value


def _state(instance: Environment) -> Any:
    key = instance.state_key()
    return key if inspect.iscoroutine(key) else state_text(key)


def _place(error: BaseException) -> str:
    """Return `` (file.py:12)``, the line of the user that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [each for each in frames if Path(each.filename).parent not in OWN_FOLDERS]
    return f" ({Path(users[0].filename).name}:{users[0].lineno})" if users else ""


def _content(returned: Any, method: str) -> str | list[Message] | None:
    """Check an observation: text, messages or None."""
    if returned is None:
        return None
    if isinstance(returned, str):
        text = clean_text(returned)
        return Appended(text) if isinstance(returned, Appended) else text
    is_list = isinstance(returned, list | tuple)
    if not is_list or not all(isinstance(each, Mapping) and "role" in each for each in returned):
        raise Failed(f"{method} returned {_brief(returned)}, not text, messages with a role, or None")
    messages: list[Message] = plain_value(returned, f"what {method} returned")
    return messages


def _rewards(returned: Any) -> dict[str, float] | None:
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        return {"": number(returned, "what reward returned")}
    if wrong := [name for name in returned if not isinstance(name, str)]:
        raise NotPlain(f"reward returned a part named {wrong[0]!r}; names are text")
    return {name: number(part, f"the part {name!r} of reward") for name, part in returned.items()}


def _info(returned: Any) -> dict[str, Any]:
    if not isinstance(returned, Mapping):
        raise NotPlain(f"info returned {_brief(returned)}, not a mapping")
    info: dict[str, Any] = plain_value(returned, "info")
    return info


def _brief(value: Any) -> str:
    is_short = isinstance(value, int | float) or (isinstance(value, str) and len(value) < 58)
    return brief(value) if is_short else f"a {type(value).__name__}"
