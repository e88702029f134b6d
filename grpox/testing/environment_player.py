"""Plays episodes as a run does, with turns of the model that a test gives; imports no torch.

Started by `grpox.runtime.workers` with component, row and turns as JSON, it plays episodes side by side in one
process, and sends `Report` as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from grpox.config import EpisodesConfig
from grpox.contracts import ToolCall
from grpox.environments import Environment
from grpox.errors import describe
from grpox.plugins.registry import bind, installed
from grpox.rollout.episodes.calls import read_hermes
from grpox.rollout.episodes.local import LocalEnvironments
from grpox.rollout.episodes.messages import (
    Action,
    Environments,
    EnvironmentSpec,
    EpisodeOutcome,
    Lost,
    Observation,
    Start,
)
from grpox.runtime.workers import connect_to_parent

STAGES = ("right after it was built", "after reset", "after its first turn", "at its end")
"""Moments at which an episode may end."""
SEED = 7


@dataclass
class Played:
    """A whole episode, as the environment answered it."""

    observations: list[Observation] = field(default_factory=list)
    """The first is of `reset`, each other of a turn."""
    outcome: EpisodeOutcome | None = None
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
            [
                each.content
                if isinstance(each.content, str | None)
                else [dict(message) for message in each.content],
                [[it.content, it.failure] for it in each.results],
                *(each.done, each.state_key),
            ]
            for each in self.observations
        ]
        if self.outcome is not None:
            rewards = None if self.outcome.rewards is None else dict(self.outcome.rewards)
            shown.append([rewards, list(self.outcome.turn_rewards), dict(self.outcome.info)])
        return shown


def play(environments: Environments, starts: Mapping[int, Start], turns: Sequence[str]) -> dict[int, Played]:
    """Play episodes side by side to their ends, each with the same turns of the model.

    Args:
        turns: what the model writes, while the episode goes on.
    """
    episodes = {key: Played() for key in starts}
    open_keys = _take(episodes, environments.start(starts), None)
    for text in turns:
        turn = read_hermes(text)  # with the calls that it holds in Hermes' form
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


@dataclass
class Report:
    """Results of episodes in one process."""

    imports_torch: bool = False
    """The module of the component imports it."""
    alone: list[Any] = field(default_factory=list)
    """Answers of an episode by itself."""
    together: list[Any] = field(default_factory=list)
    """Answers of the same episode beside another one of another seed."""
    changed_row: str = ""
    """The row, if `reset` changed it."""
    closing: dict[str, str] = field(default_factory=dict)
    """Stage -> failure as the episode was closed there."""
    left: dict[str, list[str]] = field(default_factory=dict)
    """Stage -> threads, processes and files that were left."""


def report_of(component: str | Mapping[str, Any], row: Mapping[str, Any], turns: list[str]) -> Report:
    """Play episodes of a component in this process.

    Args:
        component: as in a run file.
        row: row of the data.
        turns: turns of the model.
    """
    bound = bind("environment", component)
    blueprint = EnvironmentSpec(bound.label, bound.key, bound.load(), pickle.dumps(bound.config))
    report, before = Report("torch" in sys.modules), copy.deepcopy(dict(row))
    environments = LocalEnvironments([blueprint], [], EpisodesConfig(isolation="none"))
    own = {1: Start(0, dict(row), SEED)}
    report.alone = play(environments, own, turns)[1].answers
    if (after := own[1].row) != before:
        report.changed_row = f"{before!r:.300} became {dict(after)!r:.300}"
    beside = {0: Start(0, copy.deepcopy(before), SEED + 1), 2: Start(0, copy.deepcopy(before), SEED)}
    report.together = play(environments, beside, turns)[2].answers
    environments.close()
    for place, stage in enumerate(STAGES):
        known = _left_overs()
        if failure := _end_at(place, installed().build(bound), before, turns):
            report.closing[stage] = failure
        if left := [text for identity, text in _left_overs().items() if identity not in known]:
            report.left[stage] = left
    return report


def _end_at(stage: int, instance: Environment, row: Mapping[str, Any], turns: list[str]) -> str:
    """Close an episode at a stage of `STAGES`; return what went wrong as it was closed."""
    with asyncio.Runner() as runner:

        def call(method: str, *arguments: Any) -> Any:
            value: Any = getattr(instance, method)(*arguments)
            return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

        with contextlib.suppress(Exception):  # other checks report it
            if stage > 0:
                call("reset", dict(row), SEED)
            if stage > 1 and turns:
                call("reply", turns[0])
            for method in ("reward", "turn_rewards", "info") if stage > 2 else ():
                call(method)
        try:
            call("close")
        except Exception as error:  # noqa: BLE001 - it is reported
            return describe(error)
    return ""


async def _awaited(value: Any) -> Any:
    return await value


def _left_overs() -> dict[object, str]:
    """Name threads, child processes and open files of this process, by their identities."""
    process = psutil.Process()
    names: dict[object, str] = {thread: f"the thread {thread.name}" for thread in threading.enumerate()}
    for child in process.children(recursive=True):
        names[child] = f"the process {child.pid}"
    for file in process.open_files():
        names[file.path, file.fd] = f"the open file {file.path}"
    return names


if __name__ == "__main__":
    parent = connect_to_parent()
    parent.send_bytes(json.dumps(asdict(report_of(**json.loads(sys.argv[1])))).encode())
