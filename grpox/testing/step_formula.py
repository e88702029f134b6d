"""Compares the reduction of a loss with that of its paper, written as a plain Python function over lists.

    def token_mean(losses):
        return sum(map(sum, losses)) / sum(map(len, losses))

    class TestMine(LossConformance):
        component = "mine"
        reference = staticmethod(paper)
        reduction = staticmethod(token_mean)

The core computes the gradient of a step of several micro-batches as a run does, by the reduction that the loss
declares, and the two functions give the same gradient by the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from grpox.contracts import LossInputs
from grpox.testing.formula import (
    STEP,
    Reference,
    is_surrogate,
    parameters_of,
    reference_loss,
    require_same,
    takes_batches,
)
from grpox.testing.loss_examples import GROUP, LONGEST, example, rows, step_gradient_of

StepReduction = Callable[..., float]
"""Losses of the tokens of each sequence of a step -> the loss of the step."""
SHAPES = ((1, 2), (2, 3), (4, 6))
"""(sequences, tokens) of a step; two sequences are a micro-batch."""


def compare_step(loss: Any, reference: Reference, reduction: StepReduction, needs: Sequence[str]) -> None:
    """Compare the gradient of a step with that of a reference; see `grpox.testing.same_as`.

    Raises:
        Violation: they differ.
        ConfigError: `reduction` has an unknown parameter.
    """
    named = {"losses": None, "max_length": LONGEST}
    names = parameters_of(reduction, named)

    def reduced(losses: Tensor, mask: Tensor) -> float:
        of_tokens = [row[keep].tolist() for row, keep in zip(losses, mask, strict=True)]
        arguments = {**named, "losses": of_tokens}
        return float(reduction(**{name: arguments[name] for name in names}))

    declared = getattr(loss, "reduction", None)
    for (sequences, tokens), seed in product(SHAPES, range(2)):
        inputs = example(sequences, tokens, seed, needs, bool(getattr(loss, "folds_correction", False)))
        parts = [rows(inputs, slice(first, first + GROUP)) for first in range(0, sequences, GROUP)]
        expected = _expected(loss, reference, reduced, inputs)
        advice = f"the loss declares {declared}; or is the formula of another one?"
        require_same("gradient of the step", step_gradient_of(loss, parts), expected, inputs, advice)


def _expected(
    loss: Any, reference: Reference, reduced: Callable[[Tensor, Tensor], float], inputs: LossInputs
) -> Tensor:
    """Compute the gradient of the step by the reference: f64[B, T]."""
    is_whole, mask = takes_batches(loss), inputs.token_mask
    size = GROUP if is_whole else 1

    def losses(given: LossInputs) -> Tensor:
        firsts = range(0, len(mask), size)
        return torch.cat([reference_loss(reference, rows(given, slice(n, n + size)), is_whole) for n in firsts])

    def slope(unit: Tensor) -> float:
        if is_surrogate(loss):  # the reduction is linear: its derivative by one loss is that loss's weight
            return reduced(losses(inputs) * unit, mask)
        above, below = (
            reduced(losses(replace(inputs, logprobs=inputs.logprobs + step * unit)), mask)
            for step in (STEP, -STEP)
        )
        return (above - below) / (2 * STEP)

    gradient = torch.zeros_like(inputs.logprobs)
    for row, column in mask.nonzero().tolist():
        unit = torch.zeros_like(inputs.logprobs)
        unit[row, column] = 1
        gradient[row, column] = slope(unit)
    return gradient
