"""The base of every section of a run file, and references to components and rewards.

A component's parameters stay in its `ComponentRef` until `grpox.runfile.load` checks them against its config.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator


class Section(BaseModel):
    """A section of the run file: refuses unknown keys; the docstring below each field documents it."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    _is_read_only: bool = PrivateAttr(False)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_read_only:
            raise TypeError(f"the run's config is read-only: {name} cannot be set")
        super().__setattr__(name, value)

    def make_read_only(self) -> None:
        """Refuse that fields of this section, and of those in it, are set from now on."""
        for value in vars(self).values():
            if isinstance(value, Section):
                value.make_read_only()
        self._is_read_only = True


class Parameters(BaseModel):
    """The parameters of a component: frozen, refuses unknown keys; docstrings document the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ComponentRef(BaseModel):
    """A component by name (``dapo``, ``dist:dapo``) or by path (``my_loss.py:MyLoss``), with its parameters.

    A run file has either the bare name, or a mapping of `name` or `path` and the component's parameters.
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    name: str | None = None
    path: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.name is None) == (self.path is None):
            raise ValueError("give exactly one of 'name' and 'path'")
        return self

    @property
    def params(self) -> dict[str, Any]:
        """The component's own parameters, not yet checked."""
        return dict(self.model_extra or {})

    @property
    def label(self) -> str:
        """Label in messages and metrics: the name, or the object's name in a path."""
        return self.name or (self.path or "").rpartition(":")[2]


class RewardRef(ComponentRef):
    """A reward function, its weight in the sum, and its handling of failures."""

    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of this function's scores in the weighted sum; negative for a penalty."""
    on_error: Literal["fail", "abstain"] = "fail"
    """Handling of a reward that raises, takes too long, or returns NaN, infinity or the wrong number of scores:
    end the run, or abstain, so that these completions get no score from it. The metric
    ``rewards/<name>/errors`` counts them."""
    timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Time limit of one call in seconds; after it, `on_error` applies."""
    isolation: Literal["process", "thread"] | None = None
    """Place of the calls: a separate process, which can be killed, or a thread of the trainer. Default: a
    process for a reward given by `path` or by a plugin, a thread for built-ins and Python objects."""
    memory: float = Field(16.0, gt=0, allow_inf_nan=False)
    """Memory limit in GiB of the reward's process and its child processes; above it, the process is killed and
    `on_error` applies."""
    binary: bool = False
    """True: all scores are 0 or 1. Evaluations call the mean of such a reward accuracy if it is the first."""


def labels_of(references: Sequence[ComponentRef]) -> list[str]:
    """Return the labels of rewards or environments in metrics and files: see `RunConfig.reward_labels`."""
    labels: list[str] = []
    for reference in references:
        before = sum(other.label == reference.label for other in references[: len(labels)])
        labels.append(f"{reference.label}-{before + 1}" if before else reference.label)
    return labels
