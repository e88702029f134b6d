"""A loss and its gradient on given inputs, by itself and through the core that trains."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import LossInputs, PolicyLoss
from grpox.update.objective import ObjectiveInputs, objective, per_token_loss
from grpox.update.reduction import StepTotals, count_masks, token_weights

close = partial(torch.allclose, rtol=1e-9, atol=1e-12)
"""Whether two float64 tensors differ by the order of sums alone."""


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
    core = ObjectiveInputs(
        logprobs=given.logprobs,
        token_mask=given.token_mask,
        advantages=given.advantages,
        token_weights=torch.ones_like(given.logprobs) if weights is None else weights,
        old_logprobs=given.old_logprobs,
        entropy=given.entropy,
        correction=given.correction_weights,
    )
    [gradient] = torch.autograd.grad(objective(loss, core).loss, [given.logprobs])
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
