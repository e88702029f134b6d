"""Attention over sequences packed in one row: torch's varlen kernel, flex attention, and sdpa.

Output and gradients in bfloat16 are compared with sdpa in float32, sequence by sequence, from the same numbers.
The same for completions behind one copy of their prompt: flex attention and sdpa share it by a mask, varlen
reads it once for each completion. Their times, beside the rest of a layer that sharing saves, say whether
`train.prefix_sharing` pays on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts.part import Part, describe, relative_error

TOLERANCE = 2e-2
"""Largest relative error in bfloat16."""


class Case(NamedTuple):
    """Sequences in one row, or completions behind their common prompt."""

    lengths: Sequence[int]
    heads: int
    key_heads: int
    size: int
    """Width of a head."""
    prompt: int = 0
    """Tokens of the common prompt; 0: none."""

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.lengths)

    def segments(self, device: torch.device) -> Tensor:
        """i64[T]: 0 for the prompt, 1 .. for each token of the sequences."""
        counts = torch.tensor([self.prompt, *self.lengths])
        return torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)


SHAPES = {
    "16 x 1024": Case([1024] * 16, 14, 2, 64),
    "varied, 16384 tokens": Case([256, 512, 1024, 2048, 4096, 8192, 256], 14, 2, 64),
    "2 x 8192, heads of 128": Case([8192] * 2, 12, 2, 128),
}
SHARED = {
    "8 x 512 behind 1024": Case([512] * 8, 14, 2, 64, prompt=1024),
    "8 x 256 behind 4096": Case([256] * 8, 14, 2, 64, prompt=4096),
}
SMALL = {"3 sequences": Case([5, 9, 2], 4, 2, 16)}
SMALL_SHARED = {"3 behind a prompt": Case([5, 9, 2], 4, 2, 16, prompt=6)}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [T, Q, D], keys and values [T, K, D] -> outputs [T, Q, D]."""
Make = Callable[[Case, torch.device], Attend]


class Inputs(NamedTuple):
    """Tensors of all sequences behind one another, and the gradient that arrives."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor


def measure(part: Part) -> None:
    """Record error, ms and peak of each kernel at each shape, forward and backward; else the reason."""
    packed, shared = (SMALL, SMALL_SHARED) if part.small else (SHAPES, SHARED)
    for shapes, kernels, reference in (
        (packed, KERNELS, loop),
        (shared, SHARING_KERNELS, with_prompt(loop)),
    ):
        for name, case in shapes.items():
            compare(part, name, case, kernels, reference)


def compare(part: Part, name: str, case: Case, kernels: Mapping[str, Make], reference: Make) -> None:
    inputs = inputs_of(part, case)
    exact = Inputs(*(each.float() for each in inputs))
    expected = [each.detach() for each in results_of(reference(case, part.device), exact)]
    for kernel, make in kernels.items():
        place = f"{name}, {kernel}"
        part.record(place, point(part, make, case, inputs, expected))
        for of, error in part.figures[place].get("errors", {}).items():
            part.check(f"{place}: error of {of}", error, TOLERANCE)


def inputs_of(part: Part, case: Case) -> Inputs:
    draw = torch.Generator(part.device).manual_seed(0)

    def normal(count: int) -> Tensor:
        drawn = torch.randn(case.tokens, count, case.size, generator=draw, device=part.device)
        return drawn.to(torch.bfloat16)

    return Inputs(normal(case.heads), normal(case.key_heads), normal(case.key_heads), normal(case.heads))


def results_of(attend: Attend, inputs: Inputs, backward: bool = True) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of query, key and value."""
    leaves = [each.detach().requires_grad_(backward) for each in inputs[:3]]
    output = attend(*leaves)
    return (output, *torch.autograd.grad(output, leaves, inputs.upstream)) if backward else (output,)


def point(
    part: Part,
    make: Make,
    case: Case,
    inputs: Inputs,
    reference: Sequence[Tensor],
) -> dict[str, Any]:
    """Measure one kernel; on the CPU a kernel that does not exist there is no failure."""
    try:
        attend = make(case, part.device)
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
        if make is not flex:  # which would be compiled once more
            with torch.no_grad():
                found["forward_ms"] = 1e3 * part.seconds(lambda: attend(*inputs[:3]), rounds)
        found["peak_gib"] = part.peak_gib(again)
        return found if backward else found | {"backward": why}
    except Exception as error:  # noqa: BLE001 - the other kernels count
        if part.on_cuda and not isinstance(error, torch.OutOfMemoryError):
            part.fail(describe(error))
        return {"unavailable": describe(error)[:500]}


def loop(case: Case, device: torch.device) -> Attend:
    """Make sdpa of one sequence after another."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        parts = []
        for q, k, v in zip(*(each.split(list(case.lengths)) for each in (query, key, value)), strict=True):
            k, v = (each.repeat_interleave(repeats, dim=1) for each in (k, v))
            q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
            parts.append(scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
        return torch.cat(parts)

    return attend


def masked(case: Case, device: torch.device) -> Attend:
    """Make sdpa of one row with a mask [T, T], as prefix sharing has it."""
    segments, place = case.segments(device), torch.arange(case.tokens, device=device)
    sees = ((segments[:, None] == segments) | (segments == 0)) & (place[:, None] >= place)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Repeated as transformers does beside a mask: CUDA has no fast kernel of grouped heads with a mask.
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        return scaled_dot_product_attention(q, k, v, attn_mask=sees)[0].transpose(0, 1)

    return attend


def varlen(case: Case, device: torch.device) -> Attend:
    """Make torch's own kernel for sequences of any lengths."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32).to(device)
    takes = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    if "enable_gqa" in takes:
        causal["enable_gqa"] = True

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if "enable_gqa" not in takes:
            repeats = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        longest = max(case.lengths)
        result: Tensor = varlen_attn(query, key, value, ends, ends, longest, longest, **causal)
        return result

    return attend


def flex(case: Case, device: torch.device) -> Attend:
    """Make compiled flex attention with a mask of blocks; on the CPU it is not compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    segments = case.segments(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((segments[query] == segments[key]) | (segments[key] == 0)) & (query >= key)

    blocks = create_block_mask(sees, None, None, case.tokens, case.tokens, device)
    kernel = flex_attention
    if device.type == "cuda":
        # Each case is a graph, and after some graphs of one function torch would go on without compiling it;
        # with `fullgraph` that is an error.
        torch.compiler.reset()
        kernel = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        result: Tensor = kernel(q, k, v, block_mask=blocks, enable_gqa=True)
        return result[0].transpose(0, 1)

    return attend


def with_prompt(make: Make) -> Make:
    """Give each completion a copy of the prompt, for attention that knows sequences alone."""

    def made(case: Case, device: torch.device) -> Attend:
        prompt, copied, back, start = list(range(case.prompt)), [], list(range(case.prompt)), case.prompt
        for length in case.lengths:
            back += range(len(copied) + case.prompt, len(copied) + case.prompt + length)
            copied += [*prompt, *range(start, start + length)]
            start += length
        attend = make(case._replace(lengths=[case.prompt + each for each in case.lengths], prompt=0), device)
        rows, places = (torch.tensor(each, device=device) for each in (copied, back))

        def attend_copies(*states: Tensor) -> Tensor:
            return attend(*(each.index_select(0, rows) for each in states)).index_select(0, places)

        return attend_copies

    return made


KERNELS: dict[str, Make] = {
    "varlen": varlen,
    "flex": flex,
    "sdpa by sequence": loop,
    "sdpa with a mask": masked,
}
SHARING_KERNELS: dict[str, Make] = {
    "varlen, prompts repeated": with_prompt(varlen),
    "flex": flex,
    "sdpa with a mask": masked,
}
