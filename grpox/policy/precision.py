"""Precision of a run, and torch's settings for CUDA: TensorFloat-32 and attention without cuDNN."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING

import torch

from grpox.config.inputs import dtype_on
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    from torch import nn

    from grpox.config import ModelConfig
    from grpox.config.inputs import Dtype

logger = get_logger(__name__)

CUDNN_ORDER = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
"""Torch's environment variable for the place of cuDNN among the kernels of attention."""


def dtype_here(model: ModelConfig) -> Dtype:
    """Return the precision of the weights in this process: `dtype`, where ``auto`` depends on the device."""
    return dtype_on(model.dtype, gpu=torch.cuda.is_available())


def prepare_cuda(model: nn.Module, device: torch.device) -> None:
    """Change two of torch's defaults for models on CUDA; on other devices do nothing.

    On Hopper and Blackwell torch's attention tries cuDNN first, which builds a new graph on the host for each
    new shape. Sampling has a new shape for each token, and micro-batches differ too, so cuDNN is turned off
    unless the user sets `CUDNN_ORDER`.

    float32 products are computed in TensorFloat-32, unless `model` multiplies positions in one of them: a
    mantissa of 10 bits rounds positions above 2048, and so the angles of a rotary embedding. A precision that
    is already lower than "highest" stays.
    """
    if device.type != "cuda":
        return
    if CUDNN_ORDER not in os.environ:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if float32_precision() != "highest":
        return
    if rounded := rotary_products(model):
        logger.warning("TensorFloat-32 stays off: %s multiplies positions in a matrix product", rounded)
        return
    torch.set_float32_matmul_precision("high")


def float32_precision() -> str:
    """Return the precision of float32 products on CUDA: "highest", or "high" for TensorFloat-32.

    It reads the newer of torch's two settings, because reading the older one fails after the newer one was set.
    """
    return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


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
