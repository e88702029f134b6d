"""Products with float32 results of half-precision factors.

A logit in bfloat16 is off by up to one part in 512. The product of two bfloat16 numbers is exact in float32, so
only the sums round.
"""

from __future__ import annotations

import torch
from torch import Tensor


def raised(logits: Tensor) -> Tensor:
    """Raise half precision to float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def as_factor(tensor: Tensor) -> Tensor:
    """Convert a factor so that its products are float32 (float64 for float64 factors).

    CUDA multiplies half precision with float32 results. On other devices the result would be rounded to half
    precision, so the factors are raised before; the product of two bfloat16 numbers is exact in float32.
    """
    return tensor if tensor.device.type == "cuda" else raised(tensor)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two factors: [n, m], [m, k] -> f32[n, k]."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32)


def add_product(total: Tensor | None, left: Tensor, right: Tensor | None) -> None:
    """Add the product of two factors to `total` f32[n, k], if there is one, in place."""
    if total is None or right is None:
        return
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
