"""Plays episodes as a run does, with turns of the model that a test gives; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpox.contracts import ToolCall
from grpox.rollout.episodes.calls import HermesReader
from grpox.rollout.episodes.messages import Action, Environments, Lost, Observation, Outcome, Start


@dataclass
class Played:
    """A whole episode, as the environment answered it."""

    observations: list[Observation] = field(default_factory=list)
    """The first is of `reset`, each other of a turn."""
    outcome: Outcome | None = None
    lost: str = ""
    """Reason why the process ended before the episode."""

    @property
    def failure(self) -> str:
        """The first failure; empty if there is none."""
        failures = [each.failure for each in self.observations]
        failures += [self.outcome.failure] if self.outcome is not None else []
        return next(filter(None, failures), self.lost)

    @property
    def answers(self) -> list[Any]:
        """All that the model or the record would see, without times, as plain values."""
        shown: list[Any] = [
            [_plain(each.content), [[it.content, it.failure] for it in each.results], each.done, each.state_key]
            for each in self.observations
        ]
        if self.outcome is not None:
            rewards = None if self.outcome.rewards is None else dict(self.outcome.rewards)
            shown.append([rewards, list(self.outcome.turn_rewards), dict(self.outcome.info)])
        return shown


def _plain(content: Any) -> Any:
    """Return an observation's text or messages as plain values."""
    return content if content is None or isinstance(content, str) else [dict(each) for each in content]


def play(environments: Environments, starts: Mapping[int, Start], turns: Sequence[str]) -> dict[int, Played]:
    """Play episodes side by side to their ends, each with the same turns of the model.

    Args:
        turns: what the model writes, while the episode goes on.
    """
    episodes = {key: Played() for key in starts}
    open_keys = _take(episodes, environments.start(starts), None)
    for text in turns:
        turn = HermesReader().read(text, (), ())  # with the calls that it holds in Hermes' form
        action = Action(turn.text, turn.calls)
        open_keys = _take(episodes, environments.step(dict.fromkeys(open_keys, action)), action)
    finished = [key for key, episode in episodes.items() if not episode.lost]
    for key, outcome in environments.finish(finished).items():
        if isinstance(outcome, Lost):
            episodes[key].lost = outcome.reason
        else:
            episodes[key].outcome = outcome
    return episodes


def _take(
    episodes: Mapping[int, Played], answers: Mapping[int, Observation | Lost], action: Action | None
) -> list[int]:
    """Note the answers, and return the keys of the episodes that go on."""
    open_keys = []
    for key, answer in answers.items():
        if isinstance(answer, Lost):
            episodes[key].lost = answer.reason
            continue
        episodes[key].observations.append(answer)
        is_silent = action is not None and not action.calls and not answer.results and answer.content is None
        if not (answer.done or answer.failure or is_silent):
            open_keys.append(key)
    return open_keys


def example_calls(schema: Mapping[str, Any]) -> list[ToolCall]:
    """Return calls of a tool with arguments that fit its description: ordinary values, and small ones."""
    function = schema["function"]
    properties = function["parameters"].get("properties", {})
    sizes = (False, True) if properties else (False,)
    arguments = [{name: _example(kind, is_small) for name, kind in properties.items()} for is_small in sizes]
    return [ToolCall(function["name"], json.dumps(each)) for each in arguments]


def _example(kind: Mapping[str, Any], is_small: bool) -> Any:
    """Return a value of a JSON schema."""
    if "enum" in kind:
        return kind["enum"][-1 if is_small else 0]
    if kind.get("nullable") and is_small:
        return None
    sort = kind.get("type", "string")
    if isinstance(sort, list):
        sort = sort[0]
    if sort == "array":
        return [] if is_small else [_example(kind.get("items", {}), is_small)]
    values = {"integer": (1, 0), "number": (1.5, 0.0), "boolean": (True, False), "object": ({}, {})}
    return values.get(sort, ("a", ""))[is_small]
