"""The arguments of `grpox.train` that replace keys of a run file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import datasets
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.config.run import REWARD_OF_MODEL
from grpox.data.open_data import DATA_FILES
from grpox.errors import ConfigError, Problem, describe, nearest, text_of
from grpox.plugins import hookspecs
from grpox.plugins.hookspecs import hookimpl
from grpox.plugins.loader import InvalidPlugin, check_hooks
from grpox.policy.lora.layers import adapted_layers
from grpox.policy.model_folder import undescribed
from grpox.runfile.load import keys_by_name
from grpox.runfile.model_options import media_parts
from grpox.runfile.objects import GIVEN, MERGED, Changes, RunObjects
from grpox.runfile.overrides import ARGUMENT
from grpox.runfile.paths import input_path

_OF_TRAINER = {
    "args": "config, a run file or a mapping; `grpox import-trl` converts a GRPOConfig",
    "reward_funcs": "rewards",
    "train_dataset": "dataset",
    "processing_class": "tokenizer",
    "environment_factory": "environment",
    "optimizers": "train.optimizer and train.scheduler, in the config",
}
"""Argument of TRL's GRPOTrainer -> its replacement."""
_IN_CONFIG = "in the config or overrides"
HOOKS_OF_RUN = [
    name
    for name, hook in vars(hookspecs).items()
    if name[:6] == "grpox_" and "run" in signature(hook).parameters
]
"""Methods of an observer of a run."""
_OF_LORA = ("r", "lora_alpha", "use_rslora", "target_modules", "target_parameters", "exclude_modules")
"""Settings of peft's LoRA that `model.lora` has as well."""
_WITHOUT_EFFECT = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    # They follow from the layer, or belong to settings that are refused themselves.
    *("inference_mode", "fan_in_fan_out", "ensure_weight_tying", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    # No dropout is used, as docs/python.md says.
    "lora_dropout",
)
"""Settings of peft's LoRA that change nothing in a new adapter of `model.lora`; all others are refused."""
LONGEST_STREAM = 10_000
"""Most rows of a stream of held-out prompts: without a limit, a stream without an end would never be read."""


def read_arguments(
    model: Any,
    tokenizer: Any,
    dataset: Any,
    eval_dataset: Any,
    rewards: Any,
    environment: Any = None,
    tools: Any = None,
    callbacks: Any = (),
) -> RunObjects:
    """Check the arguments of `grpox.train`.

    Raises:
        ConfigError: an argument is invalid; the error names the key of the run file that it replaces.
    """
    changes: dict[str, Changes | Sequence[Changes | str]] = {}
    merged: dict[str, str] = {}
    functions: dict[str, Callable[..., Any]] = {}
    models: dict[str, PreTrainedModel] = {}
    rows, eval_sets = None, dict[str, datasets.Dataset]()
    if isinstance(model, str | Path):
        changes["model"] = {"path": input_path(str(model), Path.cwd())}
        model = None
    elif model is not None:
        lora: dict[str, Any] = {}
        if is_peft_model(model):
            # Before the merge, which takes the adapter apart.
            # An adapter that changes nothing, as a new one, needs no fingerprint.
            changed = any("lora_B" in name and bool(each.any()) for name, each in model.named_parameters())
            merged = {MERGED: _digest_of_adapter(model)} if changed else {}
            lora = {"lora": lora_of(model)}
            model = model.merge_and_unload()
        if what := _unfit(model):
            raise _refused("model", what, model, "a transformers PreTrainedModel, a folder, or a hub id")
        path = {"path": input_path(name, Path.cwd())} if (name := model.name_or_path) else {}
        changes["model"] = path | lora
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise _refused("tokenizer", "is no tokenizer", tokenizer, "a transformers PreTrainedTokenizerBase")
    if tokenizer is not None and tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        what = "has neither a padding nor an EOS token"
        raise _refused("tokenizer", what, tokenizer, "a tokenizer with one of them")
    if dataset is not None:
        path, rows = _read_rows(dataset, "data")
        changes["data"] = path
    if isinstance(eval_dataset, Mapping):
        sets = {}
        for name, value in eval_dataset.items():
            sets[str(name)], read = _read_rows(value, f"evaluation.sets.{name}")
            eval_sets |= {} if read is None else {str(name): read}
        if not sets:
            raise _refused("evaluation", "is empty", eval_dataset)
        changes["evaluation"] = {"sets": sets}
    elif eval_dataset is not None:
        changes["evaluation"], read = _read_rows(eval_dataset, "evaluation")
        eval_sets = {} if read is None else {"": read}
    if rewards is not None:
        is_alone = callable(rewards) or isinstance(rewards, str | Mapping)
        changes["rewards"] = [
            _read_reward(keys, place, functions, models, merged) if "function" in keys else keys
            for place, keys in enumerate(_references(rewards, "function", is_alone))
        ]
    if environment is not None:
        is_alone = isinstance(environment, str | Mapping) or not isinstance(environment, Sequence)
        changes["environment"] = references = _references(environment, "class", is_alone)
        for place, keys in enumerate(references):
            if "class" in keys:
                functions[f"environment[{place}]"] = own = keys.pop("class")
                references[place] = {"name": getattr(own, "__name__", type(own).__name__)} | keys
    if tools is not None:
        changes["tools"] = names = []
        for place, tool in enumerate([tools] if isinstance(tools, str) or callable(tools) else tools):
            if not isinstance(tool, str):
                functions[f"tools[{place}]"] = tool
                name = getattr(tool, "__name__", type(tool).__name__)
                tool = f"{getattr(tool, '__module__', '')}:{name}"
            names.append(tool)
    observers = read_callbacks(callbacks)
    return RunObjects(model, tokenizer, rows, eval_sets, functions, models, changes, merged, observers)


def _references(values: Any, under: str, is_alone: bool) -> list[dict[str, Any]]:
    """Return a list of references in the form of a run file, with objects under the key `under`."""
    return [
        {"name": each} if isinstance(each, str) else dict(each) if isinstance(each, Mapping) else {under: each}
        for each in ([values] if is_alone else values)
    ]


def refuse_arguments(others: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse unknown arguments of `grpox.train`; for an argument of TRL or a key, name its replacement."""
    problems = []
    for name, value in others.items():
        near, cure = _counterpart(name, known)
        what, allowed = f"is no argument of {ARGUMENT}{f': {cure}' if cure else ''}", ", ".join(known)
        problems.append(Problem(what, name, ARGUMENT, _shown(value), allowed, near))
    if problems:
        raise ConfigError(problems)


def _counterpart(name: str, known: Sequence[str]) -> tuple[str, str]:
    """Return the replacement of an argument that does not exist, or the remark in the table of TRL."""
    from grpox.runfile.from_trl.fields import key_of, note_of  # a table needed only for a mistake

    if (near := _OF_TRAINER.get(name)) is not None:
        return near, ""
    if key := key_of(name):
        return f"{key}, {_IN_CONFIG}", ""
    if note := note_of(name):
        return "", note
    keys = {key: f"{dotted}, {_IN_CONFIG}" for key, dotted in keys_by_name().items()}
    answers = keys | {argument: argument for argument in known}
    return answers.get(nearest(name, answers), ""), ""


def _read_rows(value: Any, key: str) -> tuple[dict[str, str], Any]:
    """Return the path that stands for rows in the config, and the rows unless `value` is a path itself."""
    if isinstance(value, str | Path):
        return {"path": input_path(str(value), Path.cwd(), DATA_FILES)}, None
    return {"path": GIVEN}, as_dataset(value, key)


def _read_reward(
    keys: dict[str, Any],
    place: int,
    functions: dict[str, Callable[..., Any]],
    models: dict[str, PreTrainedModel],
    fingerprints: dict[str, str],
) -> dict[str, Any]:
    """Add a function or model to those of the run, and return its reference in the form of a run file."""
    key, reward, digest = f"rewards[{place}]", keys.pop("function"), ""
    if is_peft_model(reward):
        # Before the merge, which takes the adapter apart.
        digest = _digest_of_adapter(reward)
        try:
            reward = reward.merge_and_unload()
        except Exception as error:
            what = f"peft cannot merge its adapter: {describe(error)}"
            allowed = "a sequence-classification model without an adapter"
            raise _refused(key, what, reward, allowed) from error
    if isinstance(reward, PreTrainedModel):
        if "ForSequenceClassification" not in type(reward).__name__ or reward.config.num_labels != 1:
            raise _refused(key, "is no sequence-classification model with one output", reward, "")
        if not (path := str(reward.name_or_path)):
            what = "the model does not say where it came from, so its tokenizer cannot be found"
            raise _refused(key, what, reward, "")
        models[key] = reward
        own = {"model": path}
        if digest:  # the folder of the base model has other weights
            own = {"model": GIVEN, "tokenizer": path}
            fingerprints[f"{key}'s merged adapter"] = digest
        return {"name": REWARD_OF_MODEL} | own | keys
    if not callable(reward) or hasattr(reward, "forward"):  # a module can be called too
        allowed = (
            "a reward function, a sequence-classification model, a component's name, or a run file's mapping"
        )
        raise ConfigError("is no reward function", key, ARGUMENT, _shown(reward), allowed)
    functions[key] = reward
    # Its own name, the wrapped function's (functools.partial), or its class's.
    name = getattr(getattr(reward, "func", reward), "__name__", type(reward).__name__)
    # Not by its line, which changes with each edit: a resumed run has the same names.
    return {"name": f"lambda_{place}" if name == "<lambda>" else name} | keys


def is_peft_model(value: Any) -> bool:
    """Return True if `value` is a model with adapters, wrapped by peft; peft is not imported."""
    return isinstance(value, nn.Module) and hasattr(value, "merge_and_unload") and hasattr(value, "peft_config")


def _digest_of_adapter(model: nn.Module) -> str:
    """Return the digest of all weights of a PeftModel that its base model lacks."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            digest.update(name.encode() + parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def lora_of(model: Any) -> dict[str, Any]:
    """Return the section `model.lora` with the settings of a PeftModel's adapter; ConfigError if it cannot."""
    allowed = "one LoRA adapter that model.lora can describe, or the model after merge_and_unload()"
    if len(model.peft_config) != 1:
        raise _refused("model", f"has {len(model.peft_config)} adapters", model, allowed)
    [settings] = model.peft_config.values()
    given = settings.to_dict()
    others = {"peft_type": str(getattr(given.get("peft_type"), "value", given.get("peft_type")))}
    if others["peft_type"] == "LORA":
        # Compared with peft's own defaults: 0 is a layer, and new settings of a later peft are refused as well.
        known = type(settings)().to_dict() | {name: given.get(name) for name in (*_OF_LORA, *_WITHOUT_EFFECT)}
        others = {name: value for name, value in given.items() if value != known.get(name)}
    targets, excluded = given.get("target_modules"), given.get("exclude_modules")
    if isinstance(targets, str) and targets != "all-linear":
        others["target_modules"] = targets
    if isinstance(excluded, str):  # a pattern must match whole names, not just their end
        others["exclude_modules"] = excluded
    if others:
        what = f"its adapter has {', '.join(f'{name}={value}' for name, value in others.items())}"
        raise _refused("model", what, model, allowed)
    lora = {"r": given["r"], "alpha": given["lora_alpha"], "use_rslora": given["use_rslora"]}
    lora["target_modules"] = targets if isinstance(targets, str) else sorted(targets or ())
    if parameters := given.get("target_parameters"):
        lora["target_parameters"] = sorted(parameters)
    if excluded:
        lora["exclude_modules"] = sorted(excluded)
    return lora


def read_callbacks(callbacks: Any) -> tuple[object, ...]:
    """Check objects with the methods of observers, and mark the methods as hooks; raises ConfigError."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise _refused("callbacks", "is no list of observers", callbacks, "a list of objects")
    for place, callback in enumerate(callbacks):
        key, allowed = f"callbacks[{place}]", f"an object with one of the methods {', '.join(HOOKS_OF_RUN)}"
        if isinstance(callback, type):
            raise _refused(key, f"is the class {callback.__name__}", callback, "an instance of it")
        methods = [name for name in HOOKS_OF_RUN if callable(getattr(callback, name, None))]
        if not methods:
            hooks = [hook.removeprefix("grpox_") for hook in HOOKS_OF_RUN]
            names = [name.removeprefix("on_") for name in dir(callback) if not name.startswith("_")]
            near = next((f"grpox_{like}" for name in names if (like := nearest(name, hooks))), "")
            what = "has none of the methods of an observer"
            raise ConfigError(what, key, ARGUMENT, type(callback).__name__, allowed, near)
        for name in methods:
            function = getattr(getattr(callback, name), "__func__", None)
            if function is not None and not hasattr(function, "grpox_impl"):
                hookimpl(function)
        try:
            check_hooks(callback)
        except InvalidPlugin as error:
            raise ConfigError(text_of(error), key, ARGUMENT, type(callback).__name__, allowed) from error
    return tuple(callbacks)


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:200]


def as_dataset(value: Any, key: str) -> datasets.Dataset | datasets.IterableDataset:
    """Return `value` as plain rows: a dataset without its format (torch, numpy), or a list as a dataset.

    Args:
        key: section of the run file: ``data``, or ``evaluation`` or a set of it, for which a stream is read
            to its end.

    Raises:
        ConfigError: it is neither, or its rows do not make a table.
    """
    if isinstance(value, datasets.IterableDataset):
        return _rows_of_stream(value, key) if key.startswith("evaluation") else value
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


def _rows_of_stream(value: datasets.IterableDataset, key: str) -> datasets.Dataset:
    """Read held-out rows to the end: every one of them is completed in each evaluation."""
    try:
        rows = list(value.with_format(None).take(LONGEST_STREAM + 1))
        table = datasets.Dataset.from_list(rows, features=value.features)
    except Exception as error:
        raise ConfigError(f"cannot be read: {describe(error)}", key=key, where=ARGUMENT) from error
    if not rows:
        raise _refused(key, "is a stream without rows", value)
    if len(rows) > LONGEST_STREAM:
        what = f"is a stream of more than {LONGEST_STREAM} rows; each evaluation completes all of them"
        raise _refused(key, what, value, "its first rows, as rows.take(500)")
    return table


def _refused(
    key: str,
    what: str,
    value: Any,
    allowed: str = "a datasets.Dataset or IterableDataset, a list of dicts, a file's path, or a hub id",
) -> ConfigError:
    return ConfigError(what, key=key, where=ARGUMENT, given=type(value).__name__, allowed=allowed)


def _unfit(model: Any) -> str:
    """Return the reason why a run cannot train a model; empty if it can."""
    if not isinstance(model, PreTrainedModel):
        if isinstance(adapters := getattr(model, "peft_config", None), Mapping):
            kinds = {str(getattr(each.peft_type, "value", each.peft_type)) for each in adapters.values()}
            return f"its adapter is of the kind {' and '.join(sorted(kinds))}, and only LoRA is trained"
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
