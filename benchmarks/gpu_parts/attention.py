"""Attention over sequences packed in one row: torch's varlen kernel, flex attention, and sdpa.

Output and gradients in bfloat16 are compared with sdpa in float32, sequence by sequence, from the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts.part import Part, describe, relative_error

TOLERANCE = 2e-2
"""Largest relative error in bfloat16."""
SHAPES = {
    "16 x 1024": ([1024] * 16, 14, 2, 64),
    "varied, 16384 tokens": ([256, 512, 1024, 2048, 4096, 8192, 256], 14, 2, 64),
    "2 x 8192, heads of 128": ([8192] * 2, 12, 2, 128),
}
"""Name -> lengths of the sequences, query heads, key heads, size of a head."""
SMALL = {"3 sequences": ([5, 9, 2], 4, 2, 16)}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [T, Q, D], keys and values [T, K, D] -> outputs [T, Q, D]."""


class Inputs(NamedTuple):
    """Tensors of all sequences behind one another, and the gradient that arrives."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor


def measure(part: Part) -> None:
    """Record error, ms and peak of each kernel at each shape, forward and backward; else the reason."""
    for name, (lengths, heads, key_heads, size) in (SMALL if part.small else SHAPES).items():
        inputs = inputs_of(part, sum(lengths), heads, key_heads, size)
        reference = [each.detach() for each in results_of(loop(lengths), Inputs(*(e.float() for e in inputs)))]
        for kernel, make in KERNELS.items():
            place = f"{name}, {kernel}"
            part.record(place, point(part, make, lengths, inputs, reference))
            for of, error in part.figures[place].get("errors", {}).items():
                part.check(f"{place}: error of {of}", error, TOLERANCE)


def inputs_of(part: Part, tokens: int, heads: int, key_heads: int, size: int) -> Inputs:
    draw = torch.Generator(part.device).manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(tokens, count, size, generator=draw, device=part.device).to(torch.bfloat16)

    return Inputs(normal(heads), normal(key_heads), normal(key_heads), normal(heads))


def results_of(attend: Attend, inputs: Inputs, backward: bool = True) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of query, key and value."""
    leaves = [each.detach().requires_grad_(backward) for each in inputs[:3]]
    output = attend(*leaves)
    return (output, *torch.autograd.grad(output, leaves, inputs.upstream)) if backward else (output,)


def point(
    part: Part,
    make: Callable[[Sequence[int], torch.device], Attend],
    lengths: Sequence[int],
    inputs: Inputs,
    reference: Sequence[Tensor],
) -> dict[str, Any]:
    """Measure one kernel; on the CPU a kernel that does not exist there is no failure."""
    try:
        attend = make(lengths, part.device)
        backward = True
        try:
            results = results_of(attend, inputs)
        except (NotImplementedError, RuntimeError) as error:
            if part.on_cuda:
                raise
            backward, why = False, describe(error)
            results = results_of(attend, inputs, backward)
        names = ("output", "query", "key", "value")
        errors = {n: relative_error(*pair) for n, *pair in zip(names, results, reference, strict=False)}
        rounds = 2 if part.small else 10

        def again() -> None:
            results_of(attend, inputs, backward)

        found: dict[str, Any] = {"errors": errors, "ms": 1e3 * part.seconds(again, rounds)}
        with torch.no_grad():
            found["forward_ms"] = 1e3 * part.seconds(lambda: attend(*inputs[:3]), rounds)
        found["peak_gib"] = part.peak_gib(again)
        return found if backward else found | {"backward": why}
    except Exception as error:  # noqa: BLE001 - the other kernels count
        if part.on_cuda and not isinstance(error, torch.OutOfMemoryError):
            part.fail(describe(error))
        return {"unavailable": describe(error)[:500]}


def loop(lengths: Sequence[int], device: torch.device | None = None) -> Attend:
    """Make sdpa of one sequence after another."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        parts = []
        for q, k, v in zip(*(each.split(list(lengths)) for each in (query, key, value)), strict=True):
            k, v = (each.repeat_interleave(repeats, dim=1) for each in (k, v))
            q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
            parts.append(scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
        return torch.cat(parts)

    return attend


def masked(lengths: Sequence[int], device: torch.device) -> Attend:
    """Make sdpa of one row with a mask [T, T], as prefix sharing has it."""
    of_token = numbers(lengths, device)
    place = torch.arange(len(of_token), device=device)
    sees = (of_token[:, None] == of_token) & (place[:, None] >= place)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        return scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)[0].transpose(0, 1)

    return attend


def varlen(lengths: Sequence[int], device: torch.device) -> Attend:
    """Make torch's own kernel for sequences of any lengths."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    takes = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    if "enable_gqa" in takes:
        causal["enable_gqa"] = True

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if "enable_gqa" not in takes:
            repeats = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        longest = max(lengths)
        result: Tensor = varlen_attn(query, key, value, ends, ends, longest, longest, **causal)
        return result

    return attend


def flex(lengths: Sequence[int], device: torch.device) -> Attend:
    """Make compiled flex attention with a mask of blocks; on the CPU it is not compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    of_token = numbers(lengths, device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (of_token[query] == of_token[key]) & (query >= key)

    blocks = create_block_mask(sees, None, None, len(of_token), len(of_token), device)
    kernel = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        result: Tensor = kernel(q, k, v, block_mask=blocks, enable_gqa=True)
        return result[0].transpose(0, 1)

    return attend


def numbers(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the number of each token's sequence, i64[T]."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths))).to(device)


KERNELS = {"varlen": varlen, "flex": flex, "sdpa by sequence": loop, "sdpa with a mask": masked}
