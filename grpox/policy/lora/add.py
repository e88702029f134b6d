"""Adds adapters to a model with peft: checks the names of layers and parameters, and replaces their modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpox.config import LoraConfig
from grpox.errors import ConfigError, Problem, nearest, text_of
from grpox.errors.formatting import some
from grpox.policy.lora.layers import ADAPTER, adapted_layers, is_of_parameter, parameter_adapters
from grpox.runfile.model_options import INSTALL

LINEAR = (nn.Linear, Conv1D)
TARGETS, EXCLUDED = "model.lora.target_modules", "model.lora.exclude_modules"
PARAMETERS = "model.lora.target_parameters"


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Add adapters with product 0 to layers and parameters of `model`, and freeze all other weights, in place.

    Args:
        seed: seed of A; B is 0. All ranks draw the same A.

    Raises:
        ConfigError: a name matches no linear layer or no parameter that can have an adapter, peft cannot adapt
            the model, or it already has adapters.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        from grpox.policy.lora.parameters import ParameterAdapter
    except ImportError as error:
        raise ConfigError(f"adapters need peft: {INSTALL}: {text_of(error)}", "model.lora") from error
    if adapted_layers(model):
        raise ConfigError(
            "merge the model's adapters first (merge_and_unload): it already has some", "model.lora"
        )
    targets, parameters = targets_of(model, config), parameter_targets(model, config)
    settings = PeftConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        target_parameters=parameters or None,
        use_rslora=config.use_rslora,
        fan_in_fan_out=bool(targets) and all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:
        what = f"peft cannot adapt these: {' '.join(text_of(error).split())}"
        key, names = (TARGETS, config.target_modules) if targets else (PARAMETERS, config.target_parameters)
        raise ConfigError(what, key, given=str(names)) from error
    _check_adapted(model, targets, parameters)
    for layer in parameter_adapters(model).values():
        layer.__class__ = ParameterAdapter  # peft accepts only its own class while it wraps


def _check_adapted(model: PreTrainedModel, targets: list[str], parameters: list[str]) -> None:
    """Refuse a model in which peft adapted other weights than the config names.

    In some models with experts peft assigns names such as ``gate_proj`` to the experts, which had these names
    in older versions of transformers, and then does not adapt the layers with these names.
    """
    layers = {name for name, layer in adapted_layers(model).items() if not is_of_parameter(layer)}
    if missing := [name for name in targets if name not in layers]:
        what = "peft does not adapt these layers in this kind of model"
        allowed = "other layers: leave these out, with model.lora.exclude_modules"
        raise ConfigError(what, TARGETS, given=some(missing), allowed=allowed)
    if wrong := sorted(parameter_adapters(model).keys() ^ set(parameters)):
        raise ConfigError("peft adapts other parameters than these", PARAMETERS, given=some(wrong))


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
    embeddings = getattr(model.get_input_embeddings(), "weight", None)
    if tied := [name for name in wanted if linear[name] is head and head.weight is embeddings]:
        what = "the head shares its weights with the embeddings, and an adapter would change only the head"
        problems.append(
            Problem(what, TARGETS, given=tied[0], allowed="other layers, or a model with separate weights")
        )
    if not problems and not wanted and not config.target_parameters:
        problems = [Problem("no layer gets an adapter", TARGETS, given=str(config.target_modules))]
    if problems:
        raise ConfigError(problems)
    return [name for name in linear if name in wanted]


def parameter_targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """List the full names of the parameters that get adapters of their own, in the order of the model.

    Raises:
        ConfigError: a name in the config matches no parameter, or one that cannot have an adapter.
    """
    if not config.target_parameters:
        return []
    names: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    reasons = {
        f"{name}.{own}": _why_unfit(module, parameter, names[id(parameter)] > 1)
        for name, module in model.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
    }
    known = list(dict.fromkeys(_end_of(name) for name, reason in reasons.items() if not reason))
    problems, wanted = [], set()
    for target in config.target_parameters:
        matching = ending_in(target, reasons)
        wanted.update(matching)
        what = next((reasons[name] for name in matching if reasons[name]), "")
        if not matching:
            is_module = any(ending_in(target, [name]) for name, _ in model.named_modules())
            what = "is a module and no parameter" if is_module else "no such parameter in this model"
        if what:
            allowed = ", ".join(known) or "no such key: all weights of this model are those of layers"
            near = "" if matching else nearest(_end_of(target), known)
            problems.append(Problem(what, PARAMETERS, given=target, allowed=allowed, nearest=near))
    if problems:
        raise ConfigError(problems)
    return [name for name in reasons if name in wanted]


def _end_of(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _why_unfit(module: nn.Module, parameter: nn.Parameter, is_shared: bool) -> str:
    """Return the reason why a parameter of `module` cannot have an adapter of its own; empty if it can."""
    if isinstance(module, LINEAR):
        return "is the weight or bias of a linear layer: name the layer in model.lora.target_modules"
    if any(kind is not nn.Module and kind.__module__.startswith("torch.nn") for kind in type(module).__mro__):
        # The model may read it outside of the layer's own forward pass: tied embeddings, fused convolutions.
        return f"belongs to a layer of torch ({type(module).__name__}), which gets no adapter"
    if parameter.dim() not in (2, 3) or not parameter.is_floating_point():
        return f"has {parameter.dim()} dimensions of {parameter.dtype}: adapters need 2 or 3 of real numbers"
    if is_shared:
        return "is shared by several modules"
    if parameter.dim() == 3 and len(parameter) == 1 and getattr(module, "is_transposed", False):
        return "is a stack of one expert, stored as [1, in, out], which peft cannot adapt"
    return ""


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
