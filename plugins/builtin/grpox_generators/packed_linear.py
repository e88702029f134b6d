"""Linear layers of a model that samples on a CPU, with weights in the blocks that oneDNN multiplies.

A product with few rows takes up to twice as long if its weight is copied into blocks first, as torch does in
each call. Here the blocks are made once for each value of the weights, and released when the generator sleeps.
Layers that read the same input, as those of queries, keys and values do, share one product: small products use
less of the memory's speed. The operators are those of torch's compiler, torch._inductor, and not public:
without them the layers stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpox_generators.configs import LEAST_WEIGHTS

ROWS = 32
"""Rows of a product for which oneDNN chooses the blocks; they serve other numbers of rows too."""

LARGEST_FROM = 2**18
"""Number of weights of a model's largest linear layer from which blocks pay; the quickstart's is smaller."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module that usually read the same input, in the order in which they are called."""


class _Product:
    """Product of an input with the weights of some layers, computed when the first of them is called."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self.release()

    def release(self) -> None:
        """Drop the blocks, and results that no layer has asked for; call when the weights change, too."""
        self._blocks: Tensor | None = None
        self._bias: Tensor | None = None
        self._input: Tensor | None = None
        self._version = 0
        self._results: dict[int, Tensor] = {}

    def of(self, layer: nn.Linear, input: Tensor) -> Tensor:
        """Return the result of one of the layers, whose others may have been called with the same input."""
        if input is not self._input or input._version != self._version or id(layer) not in self._results:
            parts = torch.split(self._multiply(input), [each.out_features for each in self._layers], dim=-1)
            self._results = dict(zip(map(id, self._layers), parts, strict=True))
            self._input, self._version = input, input._version
        result = self._results.pop(id(layer))
        if not self._results:
            self._input = None
        return result.contiguous()  # as the layer's own result

    def _multiply(self, input: Tensor) -> Tensor:
        if self._blocks is None:
            weights = [each.weight.detach() for each in self._layers]
            # A head is alone, and may be too large to copy.
            weight = torch.cat(weights) if len(weights) > 1 else weights[0].contiguous()
            self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
            biases = [each.bias.detach() for each in self._layers if each.bias is not None]
            self._bias = torch.cat(biases) if biases else None
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._blocks, self._bias, "none", [], "")
        return product


class PackedLinear(nn.Linear):
    """Linear layer without gradient that multiplies with blocks of its weight, made when they are needed."""

    product: _Product

    def forward(self, input: Tensor) -> Tensor:
        return self.product.of(self, input)


def pack(model: nn.Module) -> list[PackedLinear]:
    """Let the large linear layers of a float32 model on a CPU multiply with blocks; returns them."""
    large: list[Any] = [module for module in model.modules() if _is_large(module)]
    if max((layer.weight.numel() for layer in large), default=0) < LARGEST_FROM or not has_operators():
        return []
    packed: list[PackedLinear] = []
    for module in list(model.modules()):
        for names in SIBLINGS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(map(_is_large, layers)):
                kinds = {(layer.in_features, layer.bias is None) for layer in layers}
                packed += _share(layers) if len(kinds) == 1 else []
    for layer in large:
        if not isinstance(layer, PackedLinear):
            packed += _share([layer])
    return packed


def _share(layers: list[Any]) -> list[PackedLinear]:
    """Make packed layers with one product of `layers`."""
    product = _Product(layers)
    for layer in layers:
        layer.__class__, layer.product = PackedLinear, product
    return layers


@torch.no_grad()
def has_operators() -> bool:
    """Tell whether torch has the operators, and they compute what a linear layer does."""
    layer = nn.Linear(4, 4)
    inputs = torch.ones(1, 4)
    expected = layer(inputs)
    _share([layer])
    try:
        available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return bool(available and torch.allclose(layer(inputs), expected))
    except (AttributeError, RuntimeError, TypeError):
        return False


def _is_large(module: nn.Module | None) -> bool:
    return (
        type(module) is nn.Linear  # a subclass may multiply in its own way
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= LEAST_WEIGHTS
    )
