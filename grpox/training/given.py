"""The arguments of `grpox.train` that replace keys of a run file, checked.

A model among them is whole again after the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.config.run import REWARD_OF_MODEL
from grpox.data.open_data import DATA_FILES
from grpox.errors import ConfigError, describe
from grpox.policy.lora.layers import adapted_layers, merge_adapters
from grpox.policy.saved_whole import undescribed
from grpox.policy.weight_stream import stream_as_trained
from grpox.runfile.given import GIVEN, Changes, Given
from grpox.runfile.model_options import media_parts
from grpox.runfile.overrides import ARGUMENT
from grpox.runfile.paths import input_path

if TYPE_CHECKING:
    from grpox.policy.engine import Engine


def given_objects(
    model: PreTrainedModel | str | Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Any,
    eval_dataset: Any,
    rewards: Any,
) -> Given:
    """Check the arguments of `grpox.train`.

    Raises:
        ConfigError: an argument is invalid; names the key of the run file that it stands for.
    """
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
    """Return functions by key, models by key, and the list `rewards` of an equivalent run file.

    A mapping is as in a run file, or has a function or model under ``function`` beside ``weight`` and others.
    """
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
                if not callable(function) or hasattr(function, "forward"):  # a module can be called too
                    raise _no_function(function, key)
                functions[key] = function
                # Its own name, the wrapped function's (functools.partial), or its class's.
                inner = getattr(function, "func", function)
                keys = {"name": getattr(inner, "__name__", type(function).__name__)} | keys
            else:
                models[key] = function
                keys = {"name": REWARD_OF_MODEL, "model": path} | keys
        references.append(keys)
    return functions, models, references


def _keys(reward: Any) -> dict[str, Any]:
    if isinstance(reward, str):
        return {"name": reward}
    return dict(reward) if isinstance(reward, Mapping) else {"function": reward}


def _no_function(value: Any, key: str) -> ConfigError:
    allowed = "a reward function, a sequence-classification model, a component's name, or a run file's mapping"
    given = " ".join(repr(value).split())[:200]
    return ConfigError("is no reward function", key, where=ARGUMENT, given=given, allowed=allowed)


def as_dataset(value: Any, key: str) -> datasets.Dataset | datasets.IterableDataset:
    """Return `value` as plain rows: a dataset without its format (torch, numpy), or a list as a dataset.

    Args:
        key: section of the run file: ``data`` or ``evaluation``, which takes no stream.

    Raises:
        ConfigError: it is neither, or its rows do not make a table.
    """
    if isinstance(value, datasets.IterableDataset):
        if key == "evaluation":
            raise _refused(key, "is a stream; every held-out prompt is completed in each evaluation", value)
        return value
    if isinstance(value, datasets.Dataset):
        return value.with_format(None)
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value))
        raise _refused(key, f"is several datasets or a mapping of columns, not rows: {names}", value)
    if not isinstance(value, Sequence) or not all(isinstance(row, Mapping) for row in value):
        raise _refused(key, "holds no rows", value)
    # All columns of all rows: Dataset.from_list drops columns that the first row lacks.
    columns = dict.fromkeys(name for row in value for name in row)
    try:
        return datasets.Dataset.from_dict({name: [row.get(name) for row in value] for name in columns})
    except Exception as error:
        what = f"its rows do not make a table: {describe(error)}"
        raise ConfigError(what, key=key, where=ARGUMENT, allowed="values of one type in each column") from error


def _refused(
    key: str,
    what: str,
    value: Any,
    allowed: str = "a datasets.Dataset or IterableDataset, a list of dicts, a file's path, or a hub id",
) -> ConfigError:
    return ConfigError(what, key=key, where=ARGUMENT, given=type(value).__name__, allowed=allowed)


def check_model(model: Any) -> None:
    """Refuse a model that a run cannot train.

    Raises:
        ConfigError: it is no transformers model; its weights are quantised, spread over devices, on none,
            in another dtype than float32 or bfloat16, or sharded by an earlier run that failed; or its
            configuration describes another model.
    """
    if what := _unfit(model):
        raise _refused("model", what, model, "a transformers PreTrainedModel, a folder, or a hub id")


def _unfit(model: Any) -> str:
    if not isinstance(model, PreTrainedModel):
        return "is no transformers model"
    if not model.can_generate():
        return "is no language model: it cannot generate"
    if adapted_layers(model):
        return "it has adapters: merge them (merge_and_unload), and give model.lora for new ones"
    if parts := list(media_parts(model.config.to_dict())):
        return f"is a model of more than text ({', '.join(parts)}), and only text is trained"
    parameters = list(model.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "its weights are in the shards of a run that did not end; load it anew"
    if getattr(model, "is_quantized", False):
        return "its weights are quantised; all of them are trained"
    if any(parameter.is_meta for parameter in parameters) or len({p.device for p in parameters}) > 1:
        return "its weights are spread over devices, or on none: load it without device_map"
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16"}:
        return f"its weights are in {' and '.join(sorted(dtypes))}: make all of them float32 or bfloat16"
    return undescribed(model)


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that a run cannot use.

    Raises:
        ConfigError: it is no tokenizer of transformers, or has neither a padding nor an EOS token.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        what, allowed = "is no tokenizer", "a transformers PreTrainedTokenizerBase"
    elif tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        what, allowed = "has neither a padding nor an EOS token", "a tokenizer with one of them"
    else:
        return
    raise _refused("tokenizer", what, tokenizer, allowed)


def reward_model_path(value: Any, key: str) -> str | None:
    """Return the path of a reward model's tokenizer; None if `value` is no transformers model.

    Raises:
        ConfigError: the model has not one output, or does not know where it came from.
    """
    if not isinstance(value, PreTrainedModel):
        return None
    if "ForSequenceClassification" not in type(value).__name__ or value.config.num_labels != 1:
        raise _refused(key, "is no sequence-classification model with one output", value, "")
    if not value.name_or_path:
        what = "the model does not say where it came from, so its tokenizer cannot be found"
        raise _refused(key, what, value, "")
    return str(value.name_or_path)


def make_whole(model: PreTrainedModel, engine: Engine, device: torch.device) -> None:
    """Take `model` out of its engine, with whole parameters on `device`; a collective that closes the engine.

    ZeRO-3 has replaced each module's parameters by shards and added hooks to its forward. Adapters are merged.
    """
    whole = {name: tensor.to(device, copy=True) for name, tensor in stream_as_trained(engine.module)}
    # Tied weights are one parameter with several names; the stream has one of them.
    shards = dict(model.named_parameters(remove_duplicate=False))
    by_shard = {id(shards[name]): nn.Parameter(tensor) for name, tensor in whole.items()}
    engine.close()
    for module in model.modules():
        module._parameters = {
            name: shard if shard is None else by_shard[id(shard)] for name, shard in module._parameters.items()
        }
    if adapted_layers(model):
        merge_adapters(model)
    model.to(device).eval()
