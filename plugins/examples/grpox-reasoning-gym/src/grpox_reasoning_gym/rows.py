"""Rows of a dataset: each task's entries, dealt by weight, as prompts with what the reward needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from grpox.errors import ConfigError, Problem

from grpox_reasoning_gym.entries import written

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

    from grpox_reasoning_gym.config import SourceConfig, Task

Row = dict[str, Any]


def rows(config: SourceConfig) -> list[Row]:
    """``config.size`` rows in a random order that the seed fixes.

    Columns: prompt, and for the rewards answer (null where a task has no single one), task, settings (JSON) and
    entry (JSON).

    Raises:
        ConfigError: a task refuses its settings, or the template names what an entry does not have.
    """
    made: list[Row] = []
    counts = shares(config.size, [task.weight for task in config.tasks])
    for place, (task, count) in enumerate(zip(config.tasks, counts, strict=True)):
        # A seed of its own: reasoning-gym's entry i of seed s is entry 0 of seed s + i, so that neighbouring
        # seeds would share nearly all rows.
        seed = Random(f"{config.seed} {place} {task.task}").getrandbits(31)
        key = f"data.source.tasks.{place}"
        made += [_row(config, task, entry) for entry in _entries(task, key, seed, count)]
    Random(config.seed).shuffle(made)
    return made


def shares(size: int, weights: Sequence[float]) -> list[int]:
    """`size` divided in proportion to `weights`, to the nearest whole numbers that add up to it."""
    total, ends = sum(weights), [0]
    for place in range(len(weights)):
        ends.append(round(size * sum(weights[: place + 1]) / total))
    return [end - start for start, end in pairwise(ends)]


def _entries(task: Task, key: str, seed: int, count: int) -> Iterator[Mapping[str, Any]]:
    if count == 0:
        return  # some tasks refuse a size of 0
    dataset = built(task.task, task.settings, key, seed, count)
    for index in range(count):
        yield dataset[index]


def built(task: str, settings: Mapping[str, Any], key: str, seed: int = 0, size: int = 1) -> ProceduralDataset:
    """reasoning-gym's dataset of a task.

    Raises:
        ConfigError: it refuses its settings; the problem stands under `key`.
    """
    from reasoning_gym import create_dataset

    try:
        return create_dataset(task, seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        what = f"{task} refuses its settings: {error or type(error).__name__}"
        raise ConfigError(
            Problem(what, f"{key}.settings", given=json.dumps(dict(settings), default=str))
        ) from error


def _row(config: SourceConfig, task: Task, entry: Mapping[str, Any]) -> Row:
    answer = entry["answer"]
    return {
        "prompt": _prompt(config, _question(config, task, entry)),
        "answer": None if answer is None else str(answer),
        "task": task.task,
        "settings": json.dumps(task.settings),
        "entry": written(dict(entry)),
    }


def _question(config: SourceConfig, task: Task, entry: Mapping[str, Any]) -> str:
    fields = {**entry["metadata"], "question": entry["question"]}
    try:
        text = config.template.format_map(fields)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        what = f"an entry of {task.task} does not fit it: {type(error).__name__}: {error}"
        names = ", ".join(sorted(fields))
        raise ConfigError(
            Problem(what, "data.source.template", given=config.template, allowed=names)
        ) from error
    for old, new in config.replace.items():
        text = text.replace(old, new)
    return text


def _prompt(config: SourceConfig, question: str) -> str | list[dict[str, str]]:
    if not config.conversation:
        return question if config.system_prompt is None else f"{config.system_prompt}\n\n{question}"
    system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
    return [*system, {"role": "user", "content": question}]
