"""The dataset component and its rows: tasks' entries, mixed by weight, with the columns of the reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from grpox.errors import ConfigError

if TYPE_CHECKING:
    import datasets
    from reasoning_gym.dataset import ProceduralDataset

    from grpox_reasoning_gym.config import SourceConfig, Task

Row = dict[str, Any]
TUPLE, ITEMS = "$tuple", "$items"
"""Keys under which the JSON of an entry has a tuple, and a dict whose keys are not all text."""


class ReasoningGymSource:
    """Rows that are generated when the run starts, the same for one seed and one version of reasoning-gym."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    def load(self) -> datasets.Dataset:
        """Columns prompt, answer, task, settings and entry; see `rows`."""
        from datasets import Dataset

        return Dataset.from_list(rows(self.config))


def rows(config: SourceConfig) -> list[Row]:
    """``config.size`` rows in a random order that the seed fixes.

    Columns: prompt, and for the rewards answer (null where a task has no single one), task, settings (JSON) and
    entry (JSON).

    Raises:
        ConfigError: a task refuses its settings, or the template names what an entry does not have.
    """
    drawn: list[Row] = []
    counts = shares(config.size, [task.weight for task in config.tasks])
    for place, (task, count) in enumerate(zip(config.tasks, counts, strict=True)):
        # A seed of its own: reasoning-gym's entry i of seed s is entry 0 of seed s + i, so that neighbouring
        # seeds would share nearly all rows.
        seed = Random(f"{config.seed} {place} {task.task}").getrandbits(31)
        if count:  # some tasks refuse a size of 0
            dataset = build_dataset(task.task, task.settings, f"data.source.tasks.{place}", seed, count)
            drawn += [_row(config, task, dataset[index]) for index in range(count)]
    Random(config.seed).shuffle(drawn)
    return drawn


def shares(size: int, weights: Sequence[float]) -> list[int]:
    """`size` divided in proportion to `weights`, to the nearest whole numbers that add up to it."""
    total, ends = sum(weights), [0]
    for place in range(len(weights)):
        ends.append(round(size * sum(weights[: place + 1]) / total))
    return [end - start for start, end in pairwise(ends)]


def build_dataset(
    task: str, settings: Mapping[str, Any], key: str, seed: int = 0, size: int = 1
) -> ProceduralDataset:
    """Build reasoning-gym's dataset of a task.

    Raises:
        ConfigError: it refuses its settings; the problem stands under `key`.
    """
    from reasoning_gym import create_dataset

    try:
        return create_dataset(task, seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        what = f"{task} refuses its settings: {error or type(error).__name__}"
        raise ConfigError(what, f"{key}.settings", given=json.dumps(dict(settings), default=str)) from error


def _row(config: SourceConfig, task: Task, entry: Mapping[str, Any]) -> Row:
    answer, system, question = entry["answer"], config.system_prompt, _question(config, task, entry)
    prompt: str | list[dict[str, str]] = question if system is None else f"{system}\n\n{question}"
    if config.conversation:
        messages = {"system": system, "user": question}
        prompt = [{"role": role, "content": text} for role, text in messages.items() if text is not None]
    return {
        "prompt": prompt,
        "answer": None if answer is None else str(answer),
        "task": task.task,
        "settings": json.dumps(task.settings),
        "entry": json.dumps(_as_json(dict(entry)), ensure_ascii=False),
    }


def _question(config: SourceConfig, task: Task, entry: Mapping[str, Any]) -> str:
    fields = {**entry["metadata"], "question": entry["question"]}
    try:
        text = config.template.format_map(fields)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        what = f"an entry of {task.task} does not fit it: {type(error).__name__}: {error}"
        names = ", ".join(sorted(fields))
        raise ConfigError(what, "data.source.template", given=config.template, allowed=names) from error
    for old, new in config.replace.items():
        text = text.replace(old, new)
    return text


def _as_json(value: Any) -> Any:
    """Return an entry in values of JSON, which knows neither tuples nor integer keys; scorers need both."""
    if isinstance(value, tuple | list):
        items = [_as_json(item) for item in value]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _as_json(item) for key, item in value.items()}
        return {ITEMS: [[_as_json(key), _as_json(item)] for key, item in value.items()]}
    return value


def read_entry(text: str) -> Any:
    """Return the entry that a row has as `text`; raises ValueError if that is no JSON."""

    def restore(value: dict[str, Any]) -> Any:
        if value.keys() == {TUPLE}:
            return tuple(value[TUPLE])
        return dict(value[ITEMS]) if value.keys() == {ITEMS} else value

    return json.loads(text, object_hook=restore)
