"""Python objects passed to `grpox.train` instead of paths, and their effect on the run's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpox.config import RunConfig
from grpox.config.inputs import AUTO
from grpox.errors import ConfigError, Problem

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Changes = Mapping[str, Any]
GIVEN = "(given in Python)"
"""Placeholder path of an input that is a Python object."""


@dataclass(frozen=True)
class Given:
    """Checked Python objects; for None, the input from the config is used."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    dataset: datasets.Dataset | datasets.IterableDataset | None = None
    eval_dataset: datasets.Dataset | None = None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Key such as ``rewards[0]`` -> reward function."""
    reward_models: Mapping[str, PreTrainedModel] = field(default_factory=dict)
    """Key of a `reward_model` component -> its model."""
    changes: Mapping[str, Changes | Sequence[Changes]] = field(default_factory=dict)
    """Section -> new keys; for the rewards, the whole list."""

    @property
    def inputs(self) -> set[str]:
        """Keys of the inputs that are objects, not files."""
        objects = {"model.path": self.model, "data.path": self.dataset, "evaluation.path": self.eval_dataset}
        return {key for key, value in objects.items() if value is not None}

    @property
    def keys(self) -> set[str]:
        """Keys of the run file that arguments replace."""
        return {name if name == "rewards" else f"{name}.path" for name in self.changes}

    @property
    def num_prompts(self) -> int | None:
        """Number of rows of a dataset that has a length."""
        rows: Any = self.dataset
        return len(rows) if hasattr(rows, "__len__") else None

    @property
    def streamed(self) -> bool:
        """True if the dataset is a stream."""
        return self.dataset is not None and self.num_prompts is None

    def merged(self, data: Mapping[str, Any] | RunConfig) -> Mapping[str, Any] | RunConfig:
        """Return a copy of `data` with the objects' sections in it."""
        if not self.changes:
            return data
        merged = data.model_dump() if isinstance(data, RunConfig) else dict(data)
        for name, changes in self.changes.items():
            if not isinstance(changes, Mapping):
                merged[name] = list(changes)
                continue
            section = {} if merged.get(name) is None else merged[name]
            if not isinstance(section, Mapping):
                continue  # the schema refuses it
            replaced = ("path", "source", "subset", "split") if name == "data" else ()
            others = {key: value for key, value in section.items() if key not in replaced}
            merged[name] = {"path": section.get("path") or GIVEN} | others | dict(changes)
        self._check_model(merged.get("model"))
        return merged

    def _check_model(self, section: Any) -> None:
        """Refuse keys of the section `model` that contradict the model."""
        if self.model is None or not isinstance(section, dict):
            return
        problems = []
        if section.get("init"):
            what = "has no effect, because the model is already loaded"
            problems.append(Problem(what, key="model.init", given=str(section["init"])))
        dtype = str(self.model.dtype).removeprefix("torch.")
        if section.get("dtype", AUTO) == AUTO:
            section["dtype"] = dtype
        elif section["dtype"] != dtype:
            what = f"the model given is in {dtype}"
            problems.append(Problem(what, "model.dtype", given=str(section["dtype"]), allowed=dtype))
        if self.tokenizer is None and section["path"] == GIVEN:
            what = "the tokenizer is unknown, because the model does not say where it was loaded from"
            problems.append(Problem(what, key="model", allowed="tokenizer=, or model.path in the config"))
        if problems:
            raise ConfigError(problems)
