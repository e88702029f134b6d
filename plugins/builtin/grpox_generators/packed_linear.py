"""Linear layers of a model that samples on a CPU, with weights in the blocks that oneDNN multiplies.

A product with few rows takes up to twice as long if its weight is copied into blocks first, as torch does in
each call. Here the blocks are made once for each value of the weights, and released when the generator sleeps.
The operators are those of torch's compiler, torch._inductor, and not public: without them the layers stay as
they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpox_generators.configs import LEAST_WEIGHTS

ROWS = 32
"""Rows of a product for which oneDNN chooses the blocks; they serve other numbers of rows too."""


class PackedLinear(nn.Linear):
    """Linear layer without gradient that multiplies with blocks of its weight, made when they are needed."""

    blocks: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if self.blocks is None:
            weight = self.weight.detach().contiguous()
            self.blocks = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.blocks, self.bias, "none", [], "")
        return product


def pack(model: nn.Module) -> list[PackedLinear]:
    """Let the large linear layers of a float32 model on a CPU multiply with blocks; returns them."""
    layers: list[Any] = [module for module in model.modules() if _is_large(module)]
    if not layers or not has_operators():
        return []
    for layer in layers:
        layer.__class__ = PackedLinear
    release(layers)
    return layers


def release(layers: list[PackedLinear]) -> None:
    """Drop the blocks; call when the weights change, too."""
    for layer in layers:
        layer.blocks = None


@torch.no_grad()
def has_operators() -> bool:
    """Tell whether torch has the operators, and they compute what a linear layer does."""
    layer: Any = nn.Linear(4, 4)
    inputs = torch.ones(1, 4)
    expected = layer(inputs)
    layer.__class__ = PackedLinear
    release([layer])
    try:
        available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return bool(available and torch.allclose(layer(inputs), expected))
    except (AttributeError, RuntimeError, TypeError):
        return False


def _is_large(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear  # a subclass may multiply in its own way
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= LEAST_WEIGHTS
    )
