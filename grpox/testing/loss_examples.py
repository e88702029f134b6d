"""Inputs for losses, from the smallest up and neutral where masked, and what a loss makes of them.

Losses and gradients are measured by themselves, and through the core that trains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import Capability, LossInputs, PolicyLoss
from grpox.update.objective import MicroBatchInputs, objective, per_token_loss
from grpox.update.packing import LossTraits, StepTotals, count_masks, token_weights

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


close = partial(torch.allclose, rtol=1e-9, atol=1e-12)
"""True for two float64 tensors that differ by the order of sums alone."""


@dataclass(frozen=True)
class Measured:
    """A loss and its gradient by the log-probabilities."""

    loss: Tensor  # f64[B, T], zero where masked
    gradient: Tensor  # f64[B, T]
    diagnostics: Mapping[str, Tensor]  # name -> f64[B, T], zero where masked


def measured_on(loss: PolicyLoss, inputs: LossInputs) -> Measured:
    """The loss by itself, summed over the tokens that are not masked.

    Raises:
        RunFailed: it raised, or returned what is no loss.
    """
    given = leaf(inputs)
    output = per_token_loss(loss, given)
    values = masked(output.loss, inputs)
    [gradient] = torch.autograd.grad(values.sum(), [given.logprobs])
    diagnostics = {name: masked(made.detach(), inputs) for name, made in output.diagnostics.items()}
    return Measured(values.detach(), gradient, diagnostics)


def step_gradient_on(loss: PolicyLoss, inputs: LossInputs, weights: Tensor | None = None) -> Tensor:
    """The gradient f64[B, T] through the core, which neutralises masked positions before and after the loss.

    Args:
        weights: f64[B, T] of the tokens; 1 where none are given.

    Raises:
        RunFailed: it raised, or returned what is no loss.
    """
    given = leaf(inputs)
    core = MicroBatchInputs(
        logprobs=given.logprobs,
        token_mask=given.token_mask,
        advantages=given.advantages,
        old_logprobs=given.old_logprobs,
        entropy=given.entropy,
    )
    share = objective(
        loss,
        core,
        torch.ones_like(given.logprobs) if weights is None else weights,
        factor=given.correction_weights,
        folds_correction=LossTraits.of(loss).folds_correction,
    )
    [gradient] = torch.autograd.grad(share.loss, [given.logprobs])
    return gradient


def step_gradient_of(loss: PolicyLoss, parts: Sequence[LossInputs]) -> Tensor:
    """The gradient of one optimizer step over `parts`, its micro-batches, f64[B, T] of all rows."""
    counts = [count_masks([part.token_mask]) for part in parts]
    tokens, sequences, number = (sum(column) for column in zip(*counts, strict=True))
    totals = StepTotals(tokens, sequences, number, max_completion_length=8)
    weights = [token_weights(loss.reduction, part.token_mask, totals, torch.float64) for part in parts]
    return torch.cat([step_gradient_on(loss, part, own) for part, own in zip(parts, weights, strict=True)])


def slope(loss: PolicyLoss, inputs: LossInputs, step: float = 1e-6) -> Tensor:
    """Central differences of the summed loss by each token's log-probability: f64[B, T]."""
    slopes = torch.zeros_like(inputs.logprobs)
    for row, column in inputs.token_mask.nonzero().tolist():
        sums = []
        for sign in (1, -1):
            moved = inputs.logprobs.clone()
            moved[row, column] += sign * step
            made = per_token_loss(loss, leaf(replace(inputs, logprobs=moved))).loss.detach()
            sums.append(masked(made, inputs).sum())
        slopes[row, column] = (sums[0] - sums[1]) / (2 * step)
    return slopes


def leaf(inputs: LossInputs) -> LossInputs:
    """The inputs with log-probabilities that take a gradient, and that nobody else holds."""
    return replace(inputs, logprobs=inputs.logprobs.detach().clone().requires_grad_())


def leaves(tensor: Tensor) -> list[Tensor]:
    """The tensors that a backward pass from `tensor` leaves a gradient on."""
    found: list[Tensor] = []
    seen, ahead = set(), [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        ahead += [after for after, _ in node.next_functions]
    return found


def tensors(inputs: LossInputs) -> list[tuple[str, Tensor]]:
    """The floating-point tensors by name."""
    named = [(field.name, getattr(inputs, field.name)) for field in fields(inputs)]
    return [(name, tensor) for name, tensor in named if tensor is not None and tensor.is_floating_point()]


def masked(values: Tensor, inputs: LossInputs) -> Tensor:
    """Zeros where masked."""
    return torch.where(inputs.token_mask, values, torch.zeros_like(values))


def worst(one: Tensor, other: Tensor) -> tuple[int, int]:
    """(row, column) of the largest difference."""
    return divmod(int((one - other).abs().argmax()), one.shape[1])


def random_numbers() -> tuple[bytes, Any, bytes]:
    """The state of the global generators of torch, Python and numpy."""
    own: Any = np.random.get_state(legacy=False)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), own["state"]["key"].tobytes()
