"""Adds adapters to a model with peft: checks the names of the layers and replaces the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpox.config import LoraConfig
from grpox.errors import ConfigError, Problem, nearest, text_of
from grpox.policy.lora.layers import ADAPTER, adapted_layers
from grpox.runfile.model_options import INSTALL

LINEAR = (nn.Linear, Conv1D)
TARGETS, EXCLUDED = "model.lora.target_modules", "model.lora.exclude_modules"


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Add adapters with product 0 to layers of `model` and freeze all other weights, in place.

    Args:
        seed: seed of A; B is 0. All ranks draw the same A.

    Raises:
        ConfigError: a name matches no linear layer, peft cannot adapt the model, or it already has adapters.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"adapters need peft: {INSTALL}: {text_of(error)}", "model.lora") from error
    if adapted_layers(model):
        raise ConfigError(
            "merge the model's adapters first (merge_and_unload): it already has some", "model.lora"
        )
    targets = targets_of(model, config)
    transposed = all(isinstance(model.get_submodule(name), Conv1D) for name in targets)
    settings = PeftConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        use_rslora=config.use_rslora,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:
        what = f"peft cannot adapt these layers: {' '.join(text_of(error).split())}"
        raise ConfigError(what, TARGETS, given=str(config.target_modules)) from error
    if len(adapted_layers(model)) != len(targets):
        raise ConfigError("peft did not adapt all of these layers", TARGETS, given=", ".join(targets))


def targets_of(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """List the full names of the layers that get adapters, in the order of the model.

    Raises:
        ConfigError: a name in the config matches no linear layer, or no layer remains.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    linear = {name: module for name, module in modules.items() if isinstance(module, LINEAR)}
    head = model.get_output_embeddings()
    if config.target_modules == "all-linear":
        wanted = {name for name, module in linear.items() if module is not head}
        problems = []
    else:
        wanted = {name for target in config.target_modules for name in ending_in(target, linear)}
        problems = _unfit(config.target_modules, TARGETS, modules, linear)
    problems += _unfit(config.exclude_modules, EXCLUDED, modules, linear)
    wanted -= {name for excluded in config.exclude_modules for name in ending_in(excluded, linear)}
    tied = [name for name in wanted if linear[name] is head and _is_tied(model, head)]
    if tied:
        what = "the head shares its weights with the embeddings, and an adapter would change only the head"
        problems.append(
            Problem(what, TARGETS, given=tied[0], allowed="other layers, or a model with separate weights")
        )
    if not problems and not wanted:
        problems = [Problem("no layer gets an adapter", TARGETS, given=str(config.target_modules))]
    if problems:
        raise ConfigError(problems)
    return [name for name in linear if name in wanted]


def ending_in(target: str, names: Mapping[str, Any] | list[str]) -> list[str]:
    """Select the `names` that equal `target` or end in it."""
    return [name for name in names if name == target or name.endswith(f".{target}")]


def _unfit(
    targets: list[str], key: str, modules: Mapping[str, nn.Module], linear: Mapping[str, nn.Module]
) -> list[Problem]:
    """Find names that match no linear layer."""
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    problems = []
    for target in targets:
        if ending_in(target, linear):
            continue
        matching = ending_in(target, modules)
        what = "no such layer in this model"
        if matching:
            what = f"adapters need linear layers, but this layer is {type(modules[matching[0]]).__name__}"
        near = nearest(target.rpartition(".")[2], known)
        problems.append(Problem(what, key, given=target, allowed=", ".join(known), nearest=near))
    return problems


def _is_tied(model: PreTrainedModel, head: nn.Module) -> bool:
    embeddings = model.get_input_embeddings()
    return getattr(embeddings, "weight", None) is head.weight
