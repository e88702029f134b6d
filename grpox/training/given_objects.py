"""The arguments of `grpox.train` that take the place of what a run file names, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox.config.run import REWARD_OF_MODEL
from grpox.data.open_data import DATA_FILES
from grpox.errors import ConfigError, Problem, describe
from grpox.runfile.given import GIVEN, Changes, Given
from grpox.runfile.overrides import ARGUMENT
from grpox.runfile.paths import input_path

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def given_objects(
    model: PreTrainedModel | str | Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Any,
    eval_dataset: Any,
    rewards: Any,
) -> Given:
    """The arguments of `grpox.train`, checked.

    Raises:
        ConfigError: one is of no use; the key of the run file that it stands for is named.
    """
    from grpox.training.given_model import check_model, check_tokenizer
    from grpox.training.given_objects import as_dataset

    changes: dict[str, Changes | Sequence[Changes]] = {}
    if isinstance(model, str | Path):
        changes["model"] = {"path": input_path(str(model), Path.cwd())}
        model = None
    elif model is not None:
        check_model(model)
        changes["model"] = {"path": input_path(name, Path.cwd())} if (name := model.name_or_path) else {}
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    opened: dict[str, Any] = {"data": dataset, "evaluation": eval_dataset}
    for section, value in opened.items():
        if isinstance(value, str | Path):
            changes[section] = {"path": input_path(str(value), Path.cwd(), DATA_FILES)}
            opened[section] = None
        elif value is not None:
            changes[section] = {"path": GIVEN}
            opened[section] = as_dataset(value, section)
    functions, models, references = given_rewards(rewards)
    if references is not None:
        changes["rewards"] = references
    return Given(model, tokenizer, opened["data"], opened["evaluation"], functions, models, changes)


def given_rewards(
    rewards: Any,
) -> tuple[dict[str, Callable[..., Any]], dict[str, PreTrainedModel], list[dict[str, Any]] | None]:
    """Functions and models by key, and what the run file would list: those, names, and mappings of either.

    A mapping is as in a run file, or has a function or model under ``function`` beside ``weight`` and the like.
    """
    from grpox.training.given_model import reward_model_path

    functions: dict[str, Callable[..., Any]] = {}
    models: dict[str, PreTrainedModel] = {}
    if rewards is None:
        return functions, models, None
    references: list[dict[str, Any]] = []
    alone = callable(rewards) or isinstance(rewards, str | Mapping)
    for place, reward in enumerate([rewards] if alone else rewards):
        key, keys = f"rewards[{place}]", _keys(reward)
        if "function" in keys:
            function = keys.pop("function")
            path = reward_model_path(function, key)
            if path is None:
                functions[key] = _function(function, key)
                keys = {"name": _name(function)} | keys
            else:
                models[key] = function
                keys = {"name": REWARD_OF_MODEL, "model": path} | keys
        references.append(keys)
    return functions, models, references


def _keys(reward: Any) -> dict[str, Any]:
    if isinstance(reward, str):
        return {"name": reward}
    return dict(reward) if isinstance(reward, Mapping) else {"function": reward}


def _function(value: Any, key: str) -> Callable[..., Any]:
    # A module can be called too, though not as a reward function is.
    if callable(value) and not hasattr(value, "forward"):
        return value  # type: ignore[no-any-return]
    allowed = "a reward function, a sequence-classification model, a component's name, or a run file's mapping"
    given = " ".join(repr(value).split())[:200]
    raise ConfigError(Problem("is no reward function", key, where=ARGUMENT, given=given, allowed=allowed))


def _name(function: Callable[..., Any]) -> str:
    """Its own name, that of what it wraps (functools.partial), or its class's."""
    return getattr(getattr(function, "func", function), "__name__", type(function).__name__)


_ALLOWED = "a datasets.Dataset or IterableDataset, a list of dicts, a file's path, or a hub id"


def as_dataset(value: Any, key: str) -> datasets.Dataset | datasets.IterableDataset:
    """`value` as plain rows: a dataset's format (torch, numpy) is set aside, a list becomes a dataset.

    Args:
        key: section of the run file that it stands for: ``data`` or ``evaluation``, which takes no stream.

    Raises:
        ConfigError: it is none of these, or its rows do not make a table.
    """
    import datasets

    if isinstance(value, datasets.IterableDataset):
        if key == "evaluation":
            raise _refused(key, "is a stream; every held-out prompt is completed in each evaluation", value)
        return value
    if isinstance(value, datasets.Dataset):
        return value.with_format(None)
    if isinstance(value, Mapping):
        names = [str(name) for name in value]
        what = f"is several datasets or a mapping of columns, not rows: {', '.join(names)}"
        raise _refused(key, what, value)
    if isinstance(value, Sequence) and all(isinstance(row, Mapping) for row in value):
        return _from_rows(value, key)
    raise _refused(key, "holds no rows", value)


def _from_rows(rows: Sequence[Mapping[str, Any]], key: str) -> datasets.Dataset:
    import datasets

    # All columns of all rows: Dataset.from_list takes those of the first row and drops the rest.
    columns = dict.fromkeys(name for row in rows for name in row)
    try:
        return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})
    except Exception as error:
        what = f"its rows do not make a table: {describe(error)}"
        allowed = "values of one type in each column"
        raise ConfigError(Problem(what, key=key, where=ARGUMENT, allowed=allowed)) from error


def _refused(key: str, what: str, value: Any) -> ConfigError:
    return ConfigError(Problem(what, key=key, where=ARGUMENT, given=type(value).__name__, allowed=_ALLOWED))
