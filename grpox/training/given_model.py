"""A model object given in Python: whether a run can train it, and its weights made whole again afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.errors import ConfigError, Problem
from grpox.policy.lora.layers import adapted_layers, merge_adapters
from grpox.policy.saved_whole import undescribed
from grpox.policy.weight_stream import stream_as_trained
from grpox.runfile.model_options import media_parts
from grpox.runfile.overrides import ARGUMENT

if TYPE_CHECKING:
    from grpox.policy.engine import Engine


def check_model(model: Any) -> None:
    """Refuse what a run cannot train.

    Raises:
        ConfigError: it is no transformers model, or its weights are quantised, spread over devices, on none,
            in another dtype than float32 or bfloat16, or sharded by an earlier run that failed; or its
            configuration describes another model.
    """
    what = _unfit(model)
    if what:
        allowed = "a transformers PreTrainedModel, a folder, or a hub id"
        raise ConfigError(Problem(what, "model", where=ARGUMENT, given=type(model).__name__, allowed=allowed))


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
    """
    Raises:
        ConfigError: it is no tokenizer of transformers, or has neither a padding nor an EOS token.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        what, allowed = "is no tokenizer", "a transformers PreTrainedTokenizerBase"
    elif tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        what, allowed = "has neither a padding nor an EOS token", "a tokenizer with one of them"
    else:
        return
    given = type(tokenizer).__name__
    raise ConfigError(Problem(what, key="tokenizer", where=ARGUMENT, given=given, allowed=allowed))


def reward_model_path(value: Any, key: str) -> str | None:
    """Where the tokenizer of a reward model is; None if `value` is no transformers model.

    Raises:
        ConfigError: the model does not give one score, or does not say where it came from.
    """
    if not isinstance(value, PreTrainedModel):
        return None
    what = ""
    if "ForSequenceClassification" not in type(value).__name__ or value.config.num_labels != 1:
        what = "is no sequence-classification model with one output"
    elif not value.name_or_path:
        what = "the model does not say where it came from, so its tokenizer cannot be found"
    if what:
        raise ConfigError(Problem(what, key, where=ARGUMENT, given=type(value).__name__))
    return str(value.name_or_path)


def make_whole(model: PreTrainedModel, engine: Engine, device: torch.device) -> None:
    """Take `model` out of its engine, which is of no use afterwards: plain parameters, whole, on `device`.

    A collective. ZeRO-3 has replaced each module's parameters by shards and hung hooks on its forward. Adapters
    are merged in and taken away.
    """
    whole = {name: tensor.to(device, copy=True) for name, tensor in stream_as_trained(engine.module)}
    # Tied weights are one parameter with several names, of which the stream tells one.
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
