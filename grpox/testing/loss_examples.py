"""Inputs for losses, from the smallest up, as the core hands them over: neutral where they are masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from grpox.contracts import Capability, LossInputs

SHAPES = ((1, 1), (1, 2), (2, 1), (2, 3), (4, 6))
"""(sequences, tokens): what fails is shown on the first shape that shows it."""
SPREAD = 0.3
"""Standard deviation of the log-ratios: some are clipped by the usual bounds, most are not."""


def examples(
    needs: Sequence[str] = (), folds_correction: bool = False, dtype: torch.dtype = torch.float64
) -> Iterator[LossInputs]:
    """One for each shape, always the same."""
    for seed, (sequences, tokens) in enumerate(SHAPES):
        yield example(sequences, tokens, seed, needs, folds_correction, dtype)


def example(
    sequences: int,
    tokens: int,
    seed: int = 0,
    needs: Sequence[str] = (),
    folds_correction: bool = False,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """Sequences of several lengths, a masked token inside where there is room, advantages of both signs.

    Args:
        needs: of `entropy`, what the loss declares; what it does not is None, as in a run.
        folds_correction: whether it is given weights.
    """
    random = torch.Generator().manual_seed(seed)
    shape = (sequences, tokens)

    def uniform() -> Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    old = -0.5 - 3 * uniform()
    logprobs = (old + SPREAD * torch.randn(shape, generator=random, dtype=torch.float64)).clamp(max=-0.01)
    signs = torch.tensor([1.0 if row % 2 == 0 else -1.0 for row in range(sequences)], dtype=torch.float64)
    advantages = (signs * (0.5 + torch.rand(sequences, generator=random, dtype=torch.float64))).unsqueeze(1)
    mask = torch.arange(tokens).unsqueeze(0) < torch.tensor(
        [max(1, tokens - row) for row in range(sequences)]
    ).unsqueeze(1)
    if tokens > 3:
        mask[0, 1] = False
    given = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=advantages.expand(shape),
        token_mask=mask,
        entropy=2 * uniform() if Capability.ENTROPY in needs else None,
        correction_weights=2 * uniform() if folds_correction else None,
    )
    return neutral(mapped(given, lambda tensor: tensor.to(dtype)))


def mapped(inputs: LossInputs, function: Callable[[Tensor], Tensor]) -> LossInputs:
    """`function` of every floating-point tensor."""
    changed = {
        field.name: function(value)
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor) and value.is_floating_point()
    }
    return replace(inputs, **changed)


def neutral(inputs: LossInputs) -> LossInputs:
    """Zeros where masked, as in `grpox.update.objective`."""
    return mapped(inputs, lambda tensor: torch.where(inputs.token_mask, tensor, torch.zeros_like(tensor)))


def poisoned(inputs: LossInputs, poison: float) -> LossInputs:
    """`poison` where masked, as what comes out of a model may be."""
    return mapped(
        inputs, lambda tensor: torch.where(inputs.token_mask, tensor, torch.full_like(tensor, poison))
    )


def rows(inputs: LossInputs, places: Sequence[int] | Tensor) -> LossInputs:
    """Some sequences, in this order."""
    place = torch.as_tensor(places)
    return _every(inputs, lambda tensor: tensor[place])


def columns(inputs: LossInputs, places: Sequence[int] | Tensor) -> LossInputs:
    """Some positions, in this order."""
    place = torch.as_tensor(places)
    return _every(inputs, lambda tensor: tensor[:, place])


def padded(inputs: LossInputs, tokens: int) -> LossInputs:
    """Further positions at the end, all masked."""

    def pad(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(len(tensor), tokens)], dim=1)

    return _every(inputs, pad)


def _every(inputs: LossInputs, function: Callable[[Tensor], Tensor]) -> LossInputs:
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    changed = {name: function(tensor) for name, tensor in given.items() if tensor is not None}
    return replace(inputs, **changed)


def shown(inputs: LossInputs, **further: Tensor) -> str:
    """The inputs as text, a line for each sequence of each tensor."""
    named = {field.name: getattr(inputs, field.name) for field in fields(inputs)} | further
    width = max(map(len, named))
    return "\n".join(
        f"{name:{width}} [{row}]  " + "  ".join(_number(value) for value in values)
        for name, tensor in named.items()
        if tensor is not None
        for row, values in enumerate(tensor.tolist())
    )


def _number(value: float | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else f"{value:.4g}"
