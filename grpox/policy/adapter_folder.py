"""The policy's adapter in peft's format: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from grpox.errors import RunFailed
from grpox.policy.lora.layers import (
    ADAPTER,
    adapted_layers,
    base_parameters,
    is_of_parameter,
    parameter_adapters,
)
from grpox.policy.weight_stream import stream_adapters
from grpox.runtime.files import put_in_place, write_error_message

if TYPE_CHECKING:
    from grpox.policy.engine import Engine
    from grpox.runtime.world import World

FOLDER = "adapter"
"""Name of the adapter's folder in a run's folder and in the output of `grpox export`."""
WEIGHTS = "adapter_model.safetensors"


def save_adapter(engine: Engine, base: str, folder: Path, world: World) -> None:
    """Gather the adapter of the policy and write it on rank 0, whole or not at all; a collective.

    Args:
        base: folder or hub id of the adapter's base model.

    Raises:
        RunFailed: the adapter cannot be written; raised on every rank. The old files are still there.
    """
    state = gathered_adapter(engine.module, world)
    size, failure = sum(tensor.nbytes for tensor in state.values()), ""
    if world.is_main:
        unfinished = folder.with_name(folder.name + ".unfinished")
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            write_adapter(engine.module, state, base, unfinished)
            put_in_place(unfinished, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            failure = f"the adapter was not saved: {write_error_message(error, folder, size)}"
    if any(failures := world.gather([failure])):
        raise RunFailed("".join(failures))


def gathered_adapter(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Gather A and B of every layer by name on rank 0; other ranks get nothing. A collective."""
    state = {}
    for name, tensor in stream_adapters(model):
        if world.is_main:
            state[name] = tensor.cpu()
    return state


def write_adapter(model: nn.Module, state: Mapping[str, Tensor], base: str, folder: Path) -> None:
    """Write `state`, the adapter of `model`, to `folder` with its config.

    Args:
        state: result of `gathered_adapter`.
        base: folder or hub id of the model without the adapter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _peft_config(model, base).save_pretrained(str(folder))


def adapted_names(model: nn.Module) -> list[str]:
    """Return the names for `target_modules`: the last part of each adapted layer's name, or whole names where a
    last part names another module too."""
    layers = adapted_layers(model)
    adapted = [name for name, layer in layers.items() if not is_of_parameter(layer)]
    return _shortest(adapted, [name for name, _ in model.named_modules() if name not in layers], parts=1)


def adapted_parameter_names(model: nn.Module) -> list[str]:
    """Return the names for `target_parameters`: the last two parts of each adapted parameter's name, or whole
    names where these parts name another parameter too."""
    adapted = parameter_adapters(model)
    return _shortest(
        list(adapted), [name for name, _ in base_parameters(model) if name not in adapted], parts=2
    )


def _shortest(names: list[str], others: list[str], parts: int) -> list[str]:
    """Return the ends of `names`, of so many parts each, or whole names where an end is that of another."""
    ends = dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names)
    return names if any(".".join(name.split(".")[-parts:]) in ends for name in others) else list(ends)


def _peft_config(model: nn.Module, base: str) -> Any:
    from peft import LoraConfig

    layer = next(iter(adapted_layers(model).values()))
    return LoraConfig(
        r=layer.r[ADAPTER],
        lora_alpha=layer.lora_alpha[ADAPTER],
        lora_dropout=0.0,
        target_modules=adapted_names(model),
        target_parameters=adapted_parameter_names(model) or None,
        use_rslora=layer.use_rslora[ADAPTER],
        fan_in_fan_out=layer.fan_in_fan_out,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
