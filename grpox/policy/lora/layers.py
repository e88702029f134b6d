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
    """The adapter's change of its weight: ``scale * B A``, for each expert of a stack of E weights.

    Layout of peft's ParamWrapper: A has the experts' blocks one after another; in B the expert is the fastest
    index. A single matrix is a stack with E = 1.
    """

    down: Tensor  # A, [E r, in]
    up: Tensor  # B, [out, r E]
    scale: float
    transposed: bool
    """True if the weight is [in, out] or [E, in, out], as in transformers' Conv1D."""

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``W + scale * B A`` as a new tensor, computed in float32 or better and rounded once."""
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        stack = _as_stack(weight)
        merged = torch.empty_like(stack)
        # One expert at a time: a float32 copy of a whole stack would take twice its memory.
        for expert, (old, left, right) in enumerate(zip(stack, *self._products(len(stack)), strict=True)):
            merged[expert] = torch.addmm(old.to(exact), left.to(exact), right.to(exact), alpha=self.scale)
        return merged.view(weight.shape)

    def squared_norm(self, experts: int = 1) -> Tensor:
        """Return the squared norm of the change of a stack of `experts` weights, f64[]."""
        # |L R|^2 is the trace of (L'L)(RR'), two matrices of the rank's size: the change itself is not needed.
        left, right = (factor.double() for factor in self._products(experts))
        return self.scale**2 * ((left.mT @ left) * (right @ right.mT)).sum()

    def added_to(self, weight: Tensor) -> Tensor:
        """Return ``W + scale * B A`` in the precision of `weight`, with a gradient for A and B."""
        stack = _as_stack(weight)
        left, right = (factor.to(weight.dtype) for factor in self._products(len(stack)))
        return torch.baddbmm(stack, left, right, alpha=self.scale).view(weight.shape)

    def _products(self, experts: int) -> tuple[Tensor, Tensor]:
        """Return the factors of the change in the weight's layout, [E, rows, r] and [E, r, columns]."""
        down = self.down.reshape(experts, -1, self.down.shape[1])  # [E, r, in]
        up = self.up.reshape(len(self.up), -1, experts).permute(2, 0, 1)  # [E, out, r]
        return (down.mT, up.mT) if self.transposed else (up, down)


def _as_stack(weight: Tensor) -> Tensor:
    """Return a weight [E, rows, columns] as it is, and a single matrix as a stack of one."""
    return weight if weight.dim() == 3 else weight.unsqueeze(0)


def is_adapted(module: Any) -> bool:
    """Return True for a layer with an adapter."""
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter by name, in the order of the model; none if all weights are trained."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def parameters_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B of a layer."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def is_of_parameter(layer: Any) -> bool:
    """Return True if `layer` adapts a parameter (peft's ParamWrapper), not a whole layer."""
    return hasattr(layer, "parameter_name")


def adapted_weight(layer: Any) -> nn.Parameter:
    """Return W, the frozen parameter that the adapter of `layer` changes."""
    weight: nn.Parameter = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
    return weight


def parameter_adapters(model: nn.Module) -> dict[str, Any]:
    """Return the adapters of parameters, by the parameter's name in a model without adapters."""
    return {
        f"{name.replace('.base_layer', '')}.{layer.parameter_name}": layer
        for name, layer in adapted_layers(model).items()
        if is_of_parameter(layer)
    }


def factors_of(layer: Any, down: Tensor, up: Tensor) -> Factors:
    """Return the factors of the adapter of `layer`; `down` and `up` are its whole parameters."""
    if is_of_parameter(layer):
        # peft reads the layout of a stack from the module of the experts; a matrix is always [out, in].
        transposed = layer.num_experts > 1 and getattr(layer.get_base_layer(), "is_transposed", False)
    else:
        transposed = getattr(layer, "fan_in_fan_out", False)
    return Factors(down, up, float(layer.scaling[ADAPTER]), bool(transposed))


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
    layers = adapted_layers(model)
    for layer in layers.values():
        weight = adapted_weight(layer)
        weight.copy_(factors_of(layer, *parameters_of(layer)).merged(weight))
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        # A nested adapter, of another parameter of the same module, is merged with the outer one.
        if parent not in layers:
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
    model.requires_grad_(True)


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Count trained and all parameters of the whole model, even if this rank has only shards."""
    sizes = [
        # Under ZeRO-3 numel() counts the local shard; ds_numel counts the whole parameter.
        (int(getattr(parameter, "ds_numel", parameter.numel())), parameter.requires_grad)
        for parameter in model.parameters()
    ]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def describe_training(model: nn.Module) -> str:
    """Describe in one line the trained part of a model with adapters."""
    trained, total = parameter_counts(model)
    layers, parameters = adapted_layers(model), len(parameter_adapters(model))
    rank = next(iter(layers.values())).r[ADAPTER]
    share = f"{trained:,} of {total:,} parameters ({trained / total:.2%})"
    counts = {"layer": len(layers) - parameters, "parameter": parameters}
    places = " and ".join(pluralize(count, name) for name, count in counts.items() if count)
    return f"training {share}: adapters of rank {rank} on {places}"


def of_base(model: nn.Module, named: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Yield the entries of `named` that do not belong to adapters, under the names of a model without
    adapters."""
    adapted = adapted_layers(model)
    for name, weight in named:
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        layers = [prefix for prefix in prefixes if prefix in adapted]
        if any(name.startswith(f"{layer}.lora_") for layer in layers):
            continue
        for layer in reversed(layers):  # the innermost first: adapters of one module's parameters are nested
            name = layer + name.removeprefix(layer).removeprefix(".base_layer")
        yield name, weight
