"""The program in which the suite of environments plays episodes side by side in one process.

Started as ``python -m grpox.testing.environment_process`` with the component, its rows and turns as JSON. It
prints `Report` as JSON in its last line.
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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from grpox.config import EpisodesConfig
from grpox.environments import Environment
from grpox.errors import describe
from grpox.plugins.registry import bind, installed
from grpox.rollout.episodes.local import LocalEnvironments
from grpox.rollout.episodes.messages import Blueprint, Start
from grpox.testing.environment_player import play

STAGES = ("right after it was built", "after reset", "after its first turn", "at its end")
"""Moments at which an episode may end."""
SEED = 7


@dataclass
class Report:
    """Results of episodes in one process."""

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
    blueprint = Blueprint(bound.label, bound.key, bound.load(), pickle.dumps(bound.config))
    environments = LocalEnvironments([blueprint], [], EpisodesConfig(isolation="none"))
    report, before = Report(), copy.deepcopy(dict(row))
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
    print(f"\n{json.dumps(asdict(report_of(**json.loads(sys.argv[1]))))}")  # below what the environment printed
