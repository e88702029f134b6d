"""The limits of the device: bytes copied a second, and operations a second of a matrix product."""

from __future__ import annotations

import torch

from gpu_parts.part import Part


def measure(part: Part) -> None:
    """Record `copy_gb_per_second`, bytes read and written, and the products' `tflop_per_second` by dtype."""
    part.record("copy_gb_per_second", copy_speed(part, 2**18 if part.small else 2**32))
    side = 256 if part.small else 8192
    part.record("side", side)
    for dtype in (torch.bfloat16, torch.float32):
        part.record(f"{str(dtype).removeprefix('torch.')}_tflop_per_second", product_speed(part, side, dtype))
    torch.set_float32_matmul_precision("high")
    part.record("tf32_tflop_per_second", product_speed(part, side, torch.float32))


def copy_speed(part: Part, size: int) -> float:
    """Return the GB/s of a copy of `size` bytes within the device's memory, read and written."""
    source = torch.zeros(size, dtype=torch.uint8, device=part.device)
    target = torch.empty_like(source)
    return 2 * size / part.seconds(lambda: target.copy_(source), rounds=10) * 1e-9


def product_speed(part: Part, side: int, dtype: torch.dtype) -> float:
    """Return the TFLOP/s of the product of two square matrices of random numbers."""
    generator = torch.Generator(part.device).manual_seed(0)
    one, other = (torch.randn(side, side, generator=generator, device=part.device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return 2 * side**3 / part.seconds(lambda: torch.mm(one, other, out=out), rounds=10, warm_up=3) * 1e-12
