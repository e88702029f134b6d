"""Layers with an adapter, as peft builds them: a frozen W, and A and B, whose product is added to W.

Layers are recognised by their attributes, so this module does not need peft, which many users do not install.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from grpox.errors.formatting import pluralize

Weight = TypeVar("Weight", bound=Tensor)

ADAPTER = "default"
"""peft's default name of an adapter."""


@dataclass(frozen=True)
class Factors:
    """The adapter's change of its layer's weight: ``scale * B A``."""

    down: Tensor  # A, [r, in]
    up: Tensor  # B, [out, r]
    scale: float
    transposed: bool
    """True if the layer's weight is [in, out], as in transformers' Conv1D."""

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``W + scale * B A`` as a new tensor, computed in float32 or better and rounded once."""
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        left, right = (self.down.T, self.up.T) if self.transposed else (self.up, self.down)
        summed = torch.addmm(weight.to(exact), left.to(exact), right.to(exact), alpha=self.scale)
        return summed.to(weight.dtype)


def is_adapted(module: Any) -> bool:
    """Return True for a layer with an adapter."""
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter by name, in the order of the model; none if all weights are trained."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def parameters_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B of a layer."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def factors_of(layer: Any, down: Tensor, up: Tensor) -> Factors:
    """Return the factors of the adapter of `layer`; `down` and `up` are its whole parameters."""
    return Factors(down, up, float(layer.scaling[ADAPTER]), bool(getattr(layer, "fan_in_fan_out", False)))


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of `model` except its adapters, under their names in a model without adapters."""
    return of_base(model, model.named_parameters())


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return A and B of every layer under peft's names in a file: ``<layer>.lora_A.weight``."""
    for name, layer in adapted_layers(model).items():
        down, up = parameters_of(layer)
        yield f"{name}.lora_A.weight", down
        yield f"{name}.lora_B.weight", up


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Turn the adapters off within the block; for forward passes without a gradient."""
    layers = list(adapted_layers(model).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Merge every adapter into its weight and remove it, in place, giving a plain model. Needs whole
    parameters."""
    for name, layer in adapted_layers(model).items():
        base = layer.base_layer
        base.weight.copy_(factors_of(layer, *parameters_of(layer)).merged(base.weight))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, base)
    model.requires_grad_(True)


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Count trained and all parameters of the whole model, even if this rank has only shards."""
    sizes = [
        # Under ZeRO-3 numel() is that of the local shard; ds_numel is the whole parameter's.
        (int(getattr(parameter, "ds_numel", parameter.numel())), parameter.requires_grad)
        for parameter in model.parameters()
    ]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def describe_training(model: nn.Module) -> str:
    """Describe in one line the trained part of a model with adapters."""
    trained, total = parameter_counts(model)
    layers = adapted_layers(model)
    rank = next(iter(layers.values())).r[ADAPTER]
    share = f"{trained:,} of {total:,} parameters ({trained / total:.2%})"
    return f"training {share}: adapters of rank {rank} on {pluralize(len(layers), 'layer')}"


def of_base(model: nn.Module, named: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Yield the entries of `named` that do not belong to adapters, under the names of a model without
    adapters."""
    adapted = adapted_layers(model)
    for name, weight in named:
        layer, inside, rest = name.partition(".base_layer.")
        if inside and layer in adapted:
            yield f"{layer}.{rest}", weight
        elif not any(name.startswith(f"{layer}.lora_") for layer in _outer(name, adapted)):
            yield name, weight


def _outer(name: str, layers: dict[str, Any]) -> list[str]:
    """Return the names of `layers` that contain a parameter or buffer of this name."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return [prefix for prefix in prefixes if prefix in layers]
