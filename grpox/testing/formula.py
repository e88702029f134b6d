"""Compares a loss with the formula of its paper; see `grpox.testing.same_as`.

The inputs are random and extreme ones, from the smallest up, so that a difference shows on the first with one.
The core computes the gradient of a step of several micro-batches as a run does, by the reduction that the loss
declares; the functions of the paper give the same gradient by differences.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from grpox.contracts import LossInputs
from grpox.errors import ConfigError, nearest
from grpox.testing.conformance import Violation
from grpox.testing.loss_examples import (
    BY_SEQUENCE,
    GROUP,
    LONGEST,
    differences,
    example,
    is_of_groups,
    measured_on,
    rows,
    shown,
    step_gradient_of,
    tensors_of,
)

Reference = Callable[..., Sequence[Any]]
"""The formula: keyword arguments of lists -> a list."""
StepReduction = Callable[..., float]
"""Losses of the tokens of each sequence of a step -> the loss of the step."""
RATIOS = (0.0, 0.05, 0.15, 0.21, 0.25, 0.3, 0.5, 0.69, 1.0, 1.2, 2.0, 4.0, 8.0, 12.0)
"""Sizes of log-ratios of single tokens."""
ADVANTAGES = (1.0, -1.0, 0.0, 2.5, -0.001)
SHAPES = ((1, 2), (1, 3), (2, 3), (1, 6), (4, 6), (1, 24))
STEP_SHAPES = ((1, 2), (2, 3), (4, 6))
"""(sequences, tokens) of a step; two sequences are a micro-batch."""
STEP = 1e-5
"""Step of the central differences by which the gradient of a reference is computed."""
TOLERANCES = {
    "loss": (1e-6, 1e-9),
    "gradient": (2e-6, 1e-8),
    "gradient of the step": (2e-6, 1e-8),
}
"""Relative and absolute difference that is rounding."""


def compare_loss(loss: Any, reference: Reference, needs: Sequence[str], bounds: Sequence[float]) -> None:
    """Compare value and gradient of a loss with those of a reference, also at ratios near `bounds`."""
    for inputs in _loss_cases(needs, bool(getattr(loss, "folds_correction", False)), bounds):
        measured, own = measured_on(loss, inputs), _formula_of(loss, reference, inputs, len(inputs.logprobs))
        result = own(inputs.logprobs)
        if _is_surrogate(loss):
            require_same("gradient", measured.gradient, result, inputs)
            continue
        require_same("loss", measured.loss, result, inputs)
        slopes = differences(lambda at, own=own: own(at).sum(), inputs.logprobs, inputs.token_mask, STEP)  # type: ignore[misc]
        require_same("gradient", measured.gradient, slopes, inputs)


def compare_step(loss: Any, reference: Reference, reduction: StepReduction, needs: Sequence[str]) -> None:
    """Compare the gradient of a step with that of a reference."""
    names = parameters_of(reduction, ("losses", "max_length"))

    def reduced(losses: Tensor, mask: Tensor) -> float:
        of_tokens = [row[keep].tolist() for row, keep in zip(losses, mask, strict=True)]
        named = {"losses": of_tokens, "max_length": LONGEST}
        return float(reduction(**{name: named[name] for name in names}))

    folds = bool(getattr(loss, "folds_correction", False))
    for (sequences, tokens), seed in product(STEP_SHAPES, range(2)):
        inputs = example(sequences, tokens, seed, needs, folds)
        parts = [rows(inputs, slice(first, first + GROUP)) for first in range(0, sequences, GROUP)]
        own, mask = _formula_of(loss, reference, inputs, GROUP), inputs.token_mask
        of_step = partial(reduced, mask=mask)
        if _is_surrogate(loss):  # the reduction is linear: its derivative by one loss is that loss's weight
            values = own(inputs.logprobs)
            slopes = differences(lambda by, v=values, f=of_step: f(v * by), 0 * values, mask, 1.0)  # type: ignore[misc]
        else:
            slopes = differences(lambda at, own=own, f=of_step: f(own(at)), inputs.logprobs, mask, STEP)  # type: ignore[misc]
        advice = f"the loss declares {getattr(loss, 'reduction', None)}; or is the formula of another one?"
        require_same("gradient of the step", step_gradient_of(loss, parts), slopes, inputs, advice)


def _is_surrogate(loss: Any) -> bool:
    """Return True if the reference of `loss` returns gradients."""
    return bool(getattr(loss, "gradient", "value") == "surrogate")


def _formula_of(loss: Any, reference: Reference, inputs: LossInputs, size: int) -> Callable[[Tensor], Tensor]:
    """Return the reference as a function of the log-probabilities, f64[B, T] each, 0 where masked.

    Args:
        size: sequences of a call, for a loss whose reference gets several.
    """
    is_whole = is_of_groups(loss) or bool(getattr(loss, "mixes_rows", False))
    step = size if is_whole else 1

    def losses(logprobs: Tensor) -> Tensor:
        at = replace(inputs, logprobs=logprobs)
        parts = [rows(at, slice(first, first + step)) for first in range(0, len(logprobs), step)]
        return torch.cat([_reference_loss(reference, part, is_whole) for part in parts])

    return losses


def _loss_cases(needs: Sequence[str], folds: bool, bounds: Sequence[float]) -> Iterator[LossInputs]:
    """Yield single tokens of many ratios, then sequences with masks, then long ones."""
    one = example(1, 1, 0, needs, folds)
    sizes = sorted({*RATIOS, *_near(bounds)})
    for size, sign, advantage in product(sizes, (1, -1), ADVANTAGES):
        advantages = torch.full_like(one.advantages, advantage)
        yield replace(one, logprobs=one.old_logprobs + sign * size, advantages=advantages)
    for (sequences, tokens), seed in product(SHAPES, range(3)):
        inputs = example(sequences, tokens, seed, needs, folds)
        generator = torch.Generator().manual_seed(seed)
        shift = torch.randn(inputs.logprobs.shape, generator=generator, dtype=torch.float64)
        factor = 1.0 if tokens < 10 else 0.1
        masked = torch.where(inputs.token_mask, inputs.old_logprobs + factor * shift, 0.0)
        yield replace(inputs, logprobs=masked)
        yield replace(inputs, logprobs=masked, advantages=torch.where(inputs.token_mask, shift.flip(1), 0.0))
        yield replace(inputs, logprobs=masked, advantages=torch.zeros_like(masked))


def _near(bounds: Sequence[float]) -> Iterator[float]:
    """Yield the sizes of log-ratios on both sides of 1 +- c, c and the log-ratio c, for each bound c."""
    for bound in bounds:
        for ratio in (1 - bound, 1 + bound, bound):
            if 1e-5 < ratio < 1e5:
                yield from (abs(math.log(ratio * (1 + 1e-3 * side))) for side in (1, -1))
        if abs(bound) <= 12:
            yield from (abs(bound) * (1 + 1e-3 * side) for side in (1, -1))


def _reference_loss(reference: Reference, inputs: LossInputs, is_whole: bool) -> Tensor:
    """Call the reference; its result at masked tokens is 0: f64[B, T]."""
    named = tensors_of(inputs)
    named["mask"] = mask = named.pop("token_mask")
    names = parameters_of(reference, named)
    keep = torch.ones_like(mask) if "mask" in names else mask
    arguments: dict[str, list[Any]] = {}  # name -> a value for each sequence
    for name in names:
        pairs = zip(named[name], keep, strict=True)
        arguments[name] = [(row if name in BY_SEQUENCE else row[keeps]).tolist() for row, keeps in pairs]
    if is_whole:
        result = reference(**arguments)
    else:
        result = [reference(**{name: values[0] for name, values in arguments.items()})]
    lists = [[float(value) for value in values] for values in result]
    returned, wanted = [len(values) for values in lists], [int(row.sum()) for row in keep]
    if returned != wanted:
        what = f"the reference returned {returned} numbers for sequences of {wanted} tokens"
        raise Violation(what, shown(inputs))
    losses = torch.zeros_like(inputs.logprobs)
    losses[keep] = torch.tensor([value for values in lists for value in values], dtype=torch.float64)
    return torch.where(mask, losses, 0.0)


def parameters_of(reference: Callable[..., Any], known: Collection[str]) -> list[str]:
    """Name the parameters of `reference`, all of them `known`.

    Raises:
        ConfigError: one without a default is none of the known.
    """
    parameters = inspect.signature(reference).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(known)
    for parameter in parameters:
        if parameter.name not in known and parameter.default is parameter.empty:
            what, allowed = "the reference has a parameter that is none of the inputs", ", ".join(known)
            near = nearest(parameter.name, known)
            raise ConfigError(what, "reference", given=parameter.name, allowed=allowed, nearest=near)
    return [parameter.name for parameter in parameters if parameter.name in known]


def require_same(name: str, values: Tensor, expected: Tensor, inputs: LossInputs, advice: str = "") -> None:
    """Raise a `Violation` unless two tensors f64[B, T] differ by no more than `TOLERANCES` of `name`."""
    relative, absolute = TOLERANCES[name]
    room = absolute * (1 + expected.abs().amax()) + relative * expected.abs()
    excess = (values - expected).abs() - room
    if not bool((excess <= 0).all()):
        place = divmod(int(excess.nan_to_num(nan=math.inf).argmax()), excess.shape[1])
        of_reference = f"that of the reference {expected[place]:.6g}"
        what = f"at token {place} its {name} is {values[place]:.6g}, and {of_reference}"
        raise Violation(what, shown(inputs, **{name: values, "reference": expected}), advice)
