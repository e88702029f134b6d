"""Python objects passed to `grpox.train` instead of paths, and their effect on the run's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpox.config import RunConfig
from grpox.config.inputs import AUTO
from grpox.config.sampling import path_key
from grpox.errors import ConfigError, Problem

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Changes = Mapping[str, Any]
_REPLACED = {"data": ("path", "source", "subset", "split"), "evaluation": ("path", "sets")}
"""Section -> keys that a dataset given in Python replaces."""
GIVEN = "(given in Python)"
"""Placeholder path of an input that is a Python object."""
MERGED = "model's merged adapter"
"""Fingerprint of an adapter that was merged into the model: no file has the merged weights."""


@dataclass(frozen=True)
class RunObjects:
    """Checked Python objects; for None, the input from the config is used."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    dataset: datasets.Dataset | datasets.IterableDataset | None = None
    eval_datasets: Mapping[str, datasets.Dataset] = field(default_factory=dict)
    """Sets of held-out prompts by name; the single one of `evaluation.path` under an empty name."""
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Key such as ``rewards[0]`` -> reward function, ``environment[0]`` -> class, ``tools[0]`` -> function."""
    reward_models: Mapping[str, PreTrainedModel] = field(default_factory=dict)
    """Key of a `reward_model` component -> its model."""
    changes: Mapping[str, Changes | Sequence[Changes | str]] = field(default_factory=dict)
    """Section -> new keys; for rewards, environment and tools, the whole list."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """`MERGED` -> digest, if the weights are not those of `model.path`, as far as known; the same for adapters
    of reward models."""
    observers: Sequence[object] = ()
    """Callbacks: observers beside those of `tracking`."""

    @property
    def inputs(self) -> set[str]:
        """Keys of the inputs that are objects, not files."""
        objects = {"model.path": self.model, "data.path": self.dataset}
        given = {key for key, value in objects.items() if value is not None}
        return given | {path_key(name) for name in self.eval_datasets}

    @property
    def keys(self) -> set[str]:
        """Keys of the run file that arguments replace."""
        return {
            f"{name}.{'sets' if 'sets' in new else 'path'}" if isinstance(new, Mapping) else name
            for name, new in self.changes.items()
        }

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
        """Return a copy of `data` with the objects' sections in it.

        Raises:
            ConfigError: keys of the section `model` contradict the model.
        """
        if not self.changes:
            return data
        merged = data.model_dump() if isinstance(data, RunConfig) else dict(data)
        for name, changes in self.changes.items():
            section = {} if merged.get(name) is None else merged[name]
            if not isinstance(changes, Mapping):
                merged[name] = list(changes)
            elif isinstance(section, Mapping):  # else the schema refuses it
                replaced = _REPLACED.get(name, ())
                others = {key: value for key, value in section.items() if key not in replaced}
                path = {} if "sets" in changes else {"path": section.get("path") or GIVEN}
                merged[name] = path | others | dict(changes)
        problems, model = [], merged.get("model")
        if self.model is None or not isinstance(model, dict):
            return merged
        if init := model.get("init"):
            what = "has no effect, because the model is already loaded"
            problems.append(Problem(what, key="model.init", given=str(init)))
        dtype, given = str(self.model.dtype).removeprefix("torch."), model.get("dtype", AUTO)
        if given not in (AUTO, dtype):
            what = f"the model given is in {dtype}"
            problems.append(Problem(what, "model.dtype", given=str(given), allowed=dtype))
        if self.tokenizer is None and model["path"] == GIVEN:
            what = "the tokenizer is unknown, because the model does not say where it was loaded from"
            problems.append(Problem(what, key="model", allowed="tokenizer=, or model.path in the config"))
        if problems:
            raise ConfigError(problems)
        return merged | {"model": model | {"dtype": dtype}}
