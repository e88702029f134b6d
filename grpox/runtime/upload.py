"""Copies arrays of the host to a device; the host does not wait for the copy.

A copy from ordinary memory to a GPU waits until the GPU has done everything before it. Every tensor that a
micro-batch needs from the host therefore goes through `upload`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes to which each array begins in a shared buffer; a multiple of the size of every type."""


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to `device`: tensors of the arrays' shapes and types.

    On a GPU they share one copy, through pinned memory. On a CPU they use the memory of the arrays.
    """
    if device.type == "cuda":
        return upload_together(arrays, device, pinned=True)
    return [torch.from_numpy(array).to(device) for array in arrays]


def upload_together(arrays: Sequence[np.ndarray], device: torch.device, pinned: bool) -> list[Tensor]:
    """Copy arrays to `device` as parts of one buffer.

    Args:
        pinned: the buffer lies in pinned memory. PyTorch's allocator gives it to nobody else before the copy
            has ended.
    """
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    begins = np.cumsum([0, *sizes]).tolist()
    memory = buffer.numpy()
    for begin, array in zip(begins, arrays, strict=False):
        memory[begin : begin + array.nbytes].view(array.dtype)[:] = array.ravel()
    moved = buffer.to(device, non_blocking=True)
    tensors = []
    for begin, array in zip(begins, arrays, strict=False):
        # `data` has a version of its own: what changes one of the tensors in place changes no other.
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors.append(moved.data[begin : begin + array.nbytes].view(dtype).view(array.shape))
    return tensors
