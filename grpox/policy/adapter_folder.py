"""The policy's adapter in peft's format: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
    state = {name: tensor.cpu() for name, tensor in stream_adapters(engine.module) if world.is_main}
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


def write_adapter(model: nn.Module, state: Mapping[str, Tensor], base: str, folder: Path) -> None:
    """Write `state`, the adapter of `model`, to `folder` with its config.

    The config names layers by the last part of their names, and parameters by the last two parts. It uses whole
    names if another module or parameter has the same ending.

    Args:
        state: whole tensors, by name as `stream_adapters` yields them.
        base: folder or hub id of the model without the adapter.
    """
    from peft import LoraConfig

    layers, parameters = adapted_layers(model), parameter_adapters(model)
    names = [name for name, layer in layers.items() if not is_of_parameter(layer)]
    other_modules = [name for name, _ in model.named_modules() if name not in layers]
    other_parameters = [name for name, _ in base_parameters(model) if name not in parameters]
    layer = next(iter(layers.values()))
    config = LoraConfig(
        r=layer.r[ADAPTER],
        lora_alpha=layer.lora_alpha[ADAPTER],
        lora_dropout=0.0,
        target_modules=_shortest(names, other_modules, parts=1),
        target_parameters=_shortest(list(parameters), other_parameters, parts=2) or None,
        use_rslora=layer.use_rslora[ADAPTER],
        fan_in_fan_out=layer.fan_in_fan_out,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _shortest(names: list[str], others: list[str], parts: int) -> list[str]:
    """Return the last parts of each of `names`, or the whole names if another name has the same ending."""
    ends = dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names)
    return names if any(".".join(name.split(".")[-parts:]) in ends for name in others) else list(ends)
