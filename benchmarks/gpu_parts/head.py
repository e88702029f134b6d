"""The head alone: hidden states to log-probabilities and back, by rows per chunk.

The reference computes all logits in float32 from the same bfloat16 numbers. The ceiling is the time of the
products alone: logits twice, the gradient of the hidden states, and that of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_parts.part import Part, relative_error
from grpox.policy import logprobs as head
from grpox.policy.logprobs import LogitTransform, Wanted, chosen_logprobs, selective_log_softmax

VOCABULARY, ROWS = 151_936, 8192
WIDTHS = (896, 3584)
CHUNKS = (None, 55, 512, 1024, 2048, 8192)
"""Rows per chunk; None: grpox's own choice."""
VALUE_TOLERANCE, GRADIENT_TOLERANCE = 1e-2, 2e-2
"""Largest relative errors in bfloat16, which rounds to 1 in 256."""
CEILING_GOAL = 1.3
"""Times the products alone that the head should take; recorded, not checked."""


class Inputs(NamedTuple):
    """The tensors of one size: [N, H], [V, H], i64[N] and the gradient that arrives f32[N]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    upstream: Tensor


def measure(part: Part) -> None:
    """Record for each width the figures by rows per chunk, and those of the products alone."""
    vocabulary, rows, widths, chunks = VOCABULARY, ROWS, WIDTHS, CHUNKS
    if part.small:
        vocabulary, rows, widths, chunks = 1000, 64, (32,), (None, 7, 64)
    part.record("sizes", {"vocabulary": vocabulary, "rows": rows, "widths": widths})
    for width in widths:
        inputs = inputs_of(part, vocabulary, rows, width)
        products = part.attempt(f"width {width}, products alone", lambda i=inputs: products_alone(part, i))
        reference = reference_of(inputs)
        for size in chunks:
            name = f"width {width}, {size or 'default'} rows"
            found = part.attempt(name, lambda s=size, i=inputs, r=reference: point(part, i, r, s))
            if found is None:
                continue
            part.check(f"{name}: error of the value", found["value_error"], VALUE_TOLERANCE)
            for place in ("hidden", "weight"):
                part.check(f"{name}: error of {place}", found[f"{place}_error"], GRADIENT_TOLERANCE)
            if products:
                part.record(name, {**found, "to_products": found["ms"] / products["ms"]})
        del reference


def inputs_of(part: Part, vocabulary: int, rows: int, width: int) -> Inputs:
    draw = torch.Generator(part.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=part.device)

    weight = (normal(vocabulary, width) * width**-0.5).to(torch.bfloat16)
    targets = torch.randint(vocabulary, (rows,), generator=draw, device=part.device)
    return Inputs(normal(rows, width).to(torch.bfloat16), weight, targets, normal(rows) / rows)


def reference_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities and both gradients from all logits in float32, without TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        hidden, weight = (each.float().requires_grad_() for each in (inputs.hidden, inputs.weight))
        values = selective_log_softmax(torch.nn.functional.linear(hidden, weight), inputs.targets)
        gradients = torch.autograd.grad(values, (hidden, weight), inputs.upstream)
    finally:
        torch.set_float32_matmul_precision(precision)
    return values.detach(), *gradients


def products_alone(part: Part, inputs: Inputs) -> dict[str, Any]:
    """Time the four products of a head that computes its logits twice, with nothing between them."""
    rows = max(1, min(len(inputs.hidden), 2048))
    by_logits = torch.zeros(rows, len(inputs.weight), dtype=torch.bfloat16, device=part.device)

    def products() -> None:
        for chunk in inputs.hidden.split(rows):
            own = by_logits[: len(chunk)]
            torch.mm(chunk, inputs.weight.T, out=own)
            torch.mm(chunk, inputs.weight.T, out=own)
            torch.mm(own, inputs.weight)
            torch.mm(own.T, chunk)

    seconds = part.seconds(products)
    operations = 8 * inputs.hidden.numel() * len(inputs.weight)
    return {"ms": 1e3 * seconds, "tflop_per_second": operations / seconds * 1e-12}


def point(part: Part, inputs: Inputs, reference: tuple[Tensor, ...], rows: int | None) -> dict[str, Any]:
    """Measure the head at one size of its chunks."""
    hidden, weight = (each.detach().clone().requires_grad_() for each in (inputs.hidden, inputs.weight))
    wanted = Wanted(inputs.targets, 1.0, LogitTransform())

    def both() -> tuple[Tensor, tuple[Tensor, ...]]:
        values, _ = chosen_logprobs(hidden, weight, None, wanted)
        return values, torch.autograd.grad(values, (hidden, weight), inputs.upstream)

    with chunks_of(rows):
        values, gradients = both()
        found = {
            "value_error": relative_error(values, reference[0]),
            "hidden_error": relative_error(gradients[0], reference[1]),
            "weight_error": relative_error(gradients[1], reference[2]),
        }
        del values, gradients
        found["ms"] = 1e3 * part.seconds(both)
        found["peak_gib"] = part.peak_gib(both)
    return found


@contextmanager
def chunks_of(rows: int | None) -> Iterator[None]:
    """Give the head's chunks `rows` rows within the block; None: as many as it chooses."""
    own = head.chunk_rows
    if rows is not None:
        head.chunk_rows = lambda *_: rows
    try:
        yield
    finally:
        head.chunk_rows = own
