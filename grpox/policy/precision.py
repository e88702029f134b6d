"""Precision of a run: the type of its weights, and TensorFloat-32 for products that stay float32 on CUDA."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from grpox.config.inputs import dtype_on
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    from torch import nn

    from grpox.config import ModelConfig
    from grpox.config.inputs import Dtype

logger = get_logger(__name__)


def dtype_here(model: ModelConfig) -> Dtype:
    """Return the precision of the weights in this process: `dtype`, where ``auto`` depends on the device."""
    return dtype_on(model.dtype, gpu=torch.cuda.is_available())


def allow_tf32(model: nn.Module, device: torch.device) -> None:
    """Let CUDA compute float32 products in TensorFloat-32, unless `model` multiplies positions in one of them.

    TensorFloat-32 has a mantissa of 10 bits, which would round positions above 2048, and so the angles of
    a rotary embedding. A precision that is already lower than "highest" stays.
    """
    if device.type != "cuda" or torch.get_float32_matmul_precision() != "highest":
        return
    if rounded := rotary_products(model):
        logger.warning("TensorFloat-32 stays off: %s multiplies positions in a matrix product", rounded)
        return
    torch.set_float32_matmul_precision("high")


def rotary_products(model: nn.Module) -> str:
    """Name a module that computes the angles of positions as a matrix product; empty if none does."""
    for module in model.modules():
        if any(name.startswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            try:
                source = inspect.getsource(type(module).forward)
            except (OSError, TypeError):  # code without a file may do anything
                return type(module).__name__
            if " @ " in source or "matmul(" in source or "einsum(" in source:
                return type(module).__name__
    return ""
