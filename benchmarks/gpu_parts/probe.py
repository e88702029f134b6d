"""The calls of libraries that everything else depends on, one by one, in a few seconds.

Each has its figures, or its error. A call that needs CUDA is tried on the CPU too and told as skipped there.
cuDNN's attention is timed on and off where lengths grow from call to call, because it prepares each new shape.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts.part import Part, describe, relative_error
from grpox.policy.attention import attend_within
from grpox.policy.logprobs import add_product, multiply

LIBRARIES = ("transformers", "pyarrow", "psutil", "huggingface_hub", "datasets", "deepspeed")
WIDTHS = (64, 128, 256)
TOLERANCE = 2e-2
"""Largest relative error in bfloat16."""
CALLS = 12


def measure(part: Part) -> None:
    """Record for each call its figures or error."""
    for library in LIBRARIES:
        part.attempt(f"import {library}", partial(imported, library))
    part.record("cudnn", torch.backends.cudnn.version())
    attempt(part, "mm, out_dtype", partial(product, part, multiply))
    attempt(part, "addmm, out_dtype", partial(product, part, added))
    for width in WIDTHS:
        attempt(part, f"varlen, heads of {width}", partial(varlen, part, width))
    attempt(part, "all_reduce", partial(all_reduce, part))
    for cudnn, (name, call) in itertools.product((False, True), (("decode", decode), ("training", training))):
        attempt(part, f"sdpa, {name}, cuDNN {'on' if cudnn else 'off'}", partial(timed, part, call, cudnn))


def attempt(part: Part, name: str, call: Callable[[], dict[str, Any]]) -> None:
    """Record the figures of a call; the CPU lacks some of them, which is no failure."""
    if part.on_cuda:
        found = part.attempt(name, call)
        part.check(f"{name}: error", (found or {}).get("error_of_value", 0.0), TOLERANCE)
        return
    try:
        part.record(name, call())
    except NotImplementedError as error:
        part.record(name, {"skipped": f"needs CUDA: {describe(error)[:300]}"})


def imported(library: str) -> dict[str, Any]:
    start = time.perf_counter()
    importlib.import_module(library)
    return {"version": metadata.version(library), "seconds": time.perf_counter() - start}


def normal(part: Part, *shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator(part.device).manual_seed(seed)
    return torch.randn(*shape, generator=draw, device=part.device).to(torch.bfloat16)


def product(part: Part, multiplies: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """Multiply as the head does for the gradient of its weight: the left factor is transposed."""
    left, right = normal(part, 96, 1000).T, normal(part, 96, 64, seed=1)
    found = multiplies(left, right)
    expected = left.float().double() @ right.float().double()
    return {"dtype": str(found.dtype), "error_of_value": relative_error(found, expected)}


def added(left: Tensor, right: Tensor) -> Tensor:
    """Add a product of bfloat16 factors to a float32 sum in place."""
    total = torch.zeros(left.shape[0], right.shape[1], device=left.device)
    add_product(total, left, right)
    return total


def varlen(part: Part, width: int) -> dict[str, Any]:
    """Attend with grouped heads, forward and backward, and compare with float32 on the CPU."""
    lengths = (130, 7, 64)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    leaves = [normal(part, sum(lengths), heads, width, seed=heads) for heads in (8, 2, 2)]

    def results(inputs: list[Tensor], begins: Tensor) -> list[Tensor]:
        inputs = [each.detach().requires_grad_() for each in inputs]
        output = attend_within(*inputs, begins, max(lengths))
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    found = results(leaves, starts.to(part.device))
    expected = results([each.float().cpu() for each in leaves], starts)
    errors = [relative_error(one.cpu(), other) for one, other in zip(found, expected, strict=True)]
    return {"error_of_value": max(errors)}


def all_reduce(part: Part) -> dict[str, Any]:
    """Sum over a group of one rank."""
    backend, start = "nccl" if part.on_cuda else "gloo", time.perf_counter()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.ones(1024, device=part.device)
        dist.all_reduce(values)
        total = float(values.sum())
    finally:
        dist.destroy_process_group()
    if total != 1024:
        raise RuntimeError(f"the sum of 1024 ones over one rank is {total}")
    return {"backend": backend, "seconds": time.perf_counter() - start}


def timed(part: Part, call: Callable[[Part, int], None], cudnn: bool) -> dict[str, Any]:
    """Time calls of growing lengths after a first one."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        call(part, 0)
        part.synchronize()
        start = time.perf_counter()
        for number in range(1, CALLS + 1):
            call(part, number)
        part.synchronize()
        return {"ms_a_call": 1e3 * (time.perf_counter() - start) / CALLS}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def decode(part: Part, number: int) -> None:
    """Attend from one new token of each sequence, without and with the mask of padding, as in sampling."""
    batch, length = (2, 8) if part.small else (64, 300)
    query = torch.ones(batch, 14, 1, 64, dtype=torch.bfloat16, device=part.device)
    keys = torch.ones(batch, 2, length + number, 64, dtype=torch.bfloat16, device=part.device)
    mask = torch.ones(batch, 1, 1, length + number, dtype=torch.bool, device=part.device)
    scaled_dot_product_attention(query, keys, keys, enable_gqa=True)
    repeated = keys.repeat_interleave(7, dim=1)
    scaled_dot_product_attention(query, repeated, repeated, attn_mask=mask)


def training(part: Part, number: int) -> None:
    """Attend in padded sequences, forward and backward."""
    batch, length = (2, 8) if part.small else (8, 1000)
    shape = (batch, 14, length + number, 64)
    states = torch.ones(shape, dtype=torch.bfloat16, device=part.device, requires_grad=True)
    scaled_dot_product_attention(states, states, states, is_causal=True).sum().backward()
