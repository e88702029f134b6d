"""Parameters of source and reward. Importing this module imports neither reasoning-gym nor torch."""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal

from grpox.errors import nearest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

SYSTEM_PROMPT = (
    "Answer the question. Think first where that helps, then give your final answer between <answer> and "
    "</answer>, with nothing else between them."
)
CHOSEN_BY_SOURCE = ("seed", "size")
"""Fields of every task's settings that the source sets."""


class Task(BaseModel):
    """One task of the mixture."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    task: str
    """Its name in reasoning-gym, for example ``chain_sum``."""
    weight: float = Field(1.0, gt=0)
    """Its part of the rows, relative to the other tasks' weights."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The task's config in reasoning-gym: ``{min_terms: 2, max_digits: 3}``."""

    @field_validator("task")
    @classmethod
    def _is_a_task(cls, name: str) -> str:
        if name not in (known := tasks()):
            raise ValueError(f"reasoning-gym has no task of this name{_suggest(name, known)}")
        return name

    @field_validator("settings")
    @classmethod
    def _are_its_settings(cls, settings: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "task" not in info.data:
            return settings  # the task has an error of its own
        own = fields(tasks()[info.data["task"]])
        names = [field.name for field in own if field.name not in CHOSEN_BY_SOURCE]
        for name in settings:
            if name in CHOSEN_BY_SOURCE:
                raise ValueError(f"{name} is a key of the source, beside tasks")
            if name not in names:
                suggestion = _suggest(name, names) or f"; it has {', '.join(names) or 'none'}"
                raise ValueError(f"{info.data['task']} has no setting '{name}'{suggestion}")
        return settings


def tasks() -> dict[str, Any]:
    """Return each task of reasoning-gym with the dataclass of its settings."""
    # Imported here, because it takes a second.
    from reasoning_gym.factory import DATASETS

    # A composite is a mixture of others, which is what the key `tasks` is for.
    return {name: settings for name, (_, settings) in DATASETS.items() if name != "composite"}


def _suggest(name: str, names: Iterable[str]) -> str:
    near = nearest(name, names)
    return f"; did you mean '{near}'?" if near else ""


def _as_list(given: Any) -> Any:
    """``chain_sum``, ``{task: chain_sum}`` and a list of either, as the list of mappings that is meant."""
    given = given if isinstance(given, list | tuple) else [given]
    return [{"task": one} if isinstance(one, str) else one for one in given]


Shorthand = str | Task | list[str | Task]


class SourceConfig(BaseModel):
    """Keys of a run file under ``data.source``, besides ``name: reasoning-gym``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tasks: Annotated[list[Task], BeforeValidator(_as_list, json_schema_input_type=Shorthand)] = Field(
        min_length=1
    )
    """One name, or a list of names and of mappings with ``task``, ``weight`` and ``settings``."""
    size: int = Field(1000, ge=1)
    """Rows in all."""
    seed: int = Field(0, ge=0)
    """Another one gives other rows: two seeds share none but by chance."""
    conversation: bool = True
    """Prompts as messages, for a model with a chat template; false: as text."""
    system_prompt: str | None = SYSTEM_PROMPT
    """Comes before the question, as a message of its own or, in text, as a paragraph; null: nothing."""
    template: str = "{question}"
    """The question as the model reads it. Besides ``{question}`` it may name what the task tells of a row, such
    as ``{expression}``."""
    replace: dict[str, str] = Field(default_factory=dict)
    """Texts of the question and what stands in their place: ``{" ": ""}`` for a tokenizer without spaces."""

    @field_validator("template")
    @classmethod
    def _is_a_template(cls, template: str) -> str:
        list(string.Formatter().parse(template))  # raises ValueError for a brace too many
        return template


class RewardConfig(BaseModel):
    """Keys of the reward in a run file, besides ``name: reasoning-gym`` and its weight."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    answer: Literal["tags", "last-line", "whole"] = "tags"
    """Place of the answer: between the last ``<answer>`` and ``</answer>``, in the last line that is not empty,
    or in the whole completion."""
