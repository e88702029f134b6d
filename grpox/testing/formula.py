"""Compares a component with the formula of its paper, written as a plain Python function over lists of numbers.

    def paper(logprobs, old_logprobs, advantages):
        return [-math.exp(new - old) * A for new, old, A in zip(logprobs, old_logprobs, advantages)]

    class TestMine(LossConformance):
        component = "mine"
        reference = staticmethod(paper)

or ``same_as("loss", "mine", paper)``. The function takes what its parameters name. The inputs are random and
extreme ones, from the smallest up, so that a difference shows on the first that has it.

The reduction of a loss is compared with a function that returns the loss of a step:

    def token_mean(losses):
        return sum(map(sum, losses)) / sum(map(len, losses))

With ``reduction = staticmethod(token_mean)`` the core computes the gradient of a step of several micro-batches
as a run does, by the reduction that the loss declares; the two functions give the same gradient by the paper.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from grpox.contracts import LossInputs
from grpox.errors import ConfigError, nearest
from grpox.testing.conformance import Violation, require
from grpox.testing.direction import Correct, Scale, describe_batch
from grpox.testing.loss_examples import (
    BY_SEQUENCE,
    GROUP,
    LONGEST,
    differences,
    example,
    measured_on,
    rows,
    shown,
    step_gradient_of,
    tensors_of,
)
from grpox.testing.loss_inputs import is_of_groups

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
    "advantage": (1e-4, 1e-5),
    "correction": (1e-6, 1e-9),
}
"""Relative and absolute difference that is rounding; advantages are of float32."""


# -- Losses ----------------------------------------------------------------------------------------------


def compare_loss(loss: Any, reference: Reference, needs: Sequence[str], bounds: Sequence[float]) -> None:
    """Compare value and gradient of a loss with those of a reference; see `grpox.testing.same_as`.

    Args:
        bounds: numbers among the parameters of the loss, near which its ratios are tried too.

    Raises:
        Violation: they differ.
    """
    folds, is_whole = bool(getattr(loss, "folds_correction", False)), _takes_batches(loss)
    for inputs in _loss_cases(needs, folds, bounds):
        measured = measured_on(loss, inputs)
        parts = [inputs] if is_whole else [rows(inputs, [row]) for row in range(len(inputs.logprobs))]
        result = torch.cat([_reference_loss(reference, part, is_whole) for part in parts])
        if _is_surrogate(loss):
            require_same("gradient", measured.gradient, result, inputs)
            continue
        require_same("loss", measured.loss, result, inputs)
        slopes = torch.cat([_reference_slope(reference, part, is_whole) for part in parts])
        require_same("gradient", measured.gradient, slopes, inputs)


def compare_step(loss: Any, reference: Reference, reduction: StepReduction, needs: Sequence[str]) -> None:
    """Compare the gradient of a step with that of a reference; see `grpox.testing.same_as`.

    Raises:
        Violation: they differ.
        ConfigError: `reduction` has an unknown parameter.
    """
    names = parameters_of(reduction, ("losses", "max_length"))

    def reduced(losses: Tensor, mask: Tensor) -> float:
        of_tokens = [row[keep].tolist() for row, keep in zip(losses, mask, strict=True)]
        named = {"losses": of_tokens, "max_length": LONGEST}
        return float(reduction(**{name: named[name] for name in names}))

    declared, folds = getattr(loss, "reduction", None), bool(getattr(loss, "folds_correction", False))
    for (sequences, tokens), seed in product(STEP_SHAPES, range(2)):
        inputs = example(sequences, tokens, seed, needs, folds)
        parts = [rows(inputs, slice(first, first + GROUP)) for first in range(0, sequences, GROUP)]
        expected = _reference_step(loss, reference, reduced, inputs)
        advice = f"the loss declares {declared}; or is the formula of another one?"
        require_same("gradient of the step", step_gradient_of(loss, parts), expected, inputs, advice)


def _reference_step(
    loss: Any, reference: Reference, reduced: Callable[[Tensor, Tensor], float], inputs: LossInputs
) -> Tensor:
    """Compute the gradient of the step by the reference: f64[B, T]."""
    is_whole, mask = _takes_batches(loss), inputs.token_mask
    size = GROUP if is_whole else 1

    def losses(values: Tensor) -> Tensor:
        given = replace(inputs, logprobs=values)
        parts = [rows(given, slice(first, first + size)) for first in range(0, len(mask), size)]
        return torch.cat([_reference_loss(reference, part, is_whole) for part in parts])

    if _is_surrogate(loss):  # the reduction is linear: its derivative by one loss is that loss's weight
        own = losses(inputs.logprobs)
        return differences(lambda factors: reduced(own * factors, mask), torch.zeros_like(own), mask, 1.0)
    return differences(lambda values: reduced(losses(values), mask), inputs.logprobs, mask, STEP)


def _is_surrogate(loss: Any) -> bool:
    """Return True if the reference of `loss` returns gradients."""
    return bool(getattr(loss, "gradient", "value") == "surrogate")


def _takes_batches(loss: Any) -> bool:
    """Return True if the reference of `loss` is called with all sequences of a micro-batch."""
    return is_of_groups(loss) or bool(getattr(loss, "mixes_rows", False))


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


def _reference_slope(reference: Reference, inputs: LossInputs, is_whole: bool) -> Tensor:
    """Compute central differences of the reference's sum over tokens that are not masked: f64[B, T]."""

    def total(values: Tensor) -> Tensor:
        return _reference_loss(reference, replace(inputs, logprobs=values), is_whole).sum()

    return differences(total, inputs.logprobs, inputs.token_mask, STEP)


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


# -- Advantages ------------------------------------------------------------------------------------------


def compare_advantage(scale: Scale, reference: Reference) -> None:
    """Compare advantages with those of a reference; see `grpox.testing.same_as`.

    Raises:
        Violation: they differ.
    """
    names = parameters_of(reference, ("rewards", "weights", "groups"))
    for rewards, weights, groups in _batches():
        try:
            values = scale(rewards, weights, groups)
        except Violation:
            if any(value < 0 for row in rewards for value in row):  # a scaler may refuse rewards below 0
                continue
            raise
        plain = [[None if math.isnan(value) else value for value in row] for row in rewards]
        arguments = {"rewards": plain, "weights": list(weights), "groups": list(groups)}
        expected = [float(value) for value in reference(**{name: arguments[name] for name in names})]
        batch = describe_batch(rewards, weights, groups, values)
        what = f"the reference returned {len(expected)} numbers for {len(rewards)} completions"
        require(len(expected) == len(rewards), what, batch)
        relative, absolute = TOLERANCES["advantage"]
        for row, (value, wanted) in enumerate(zip(values, expected, strict=True)):
            what = f"the advantage of row {row} is {value:.6g}, and that of the reference {wanted:.6g}"
            require(math.isclose(value, wanted, rel_tol=relative, abs_tol=absolute), what, batch)


def _batches() -> Iterator[tuple[list[list[float]], list[float], list[int]]]:
    """Yield generation batches from one completion up: ties, abstentions, interleaved groups, weights."""
    numbers, nan = random.Random(0), math.nan
    yield [[1.0]], [1.0], [0]
    yield [[0.0], [1.0]], [1.0], [0, 0]
    yield [[0.5], [0.5]], [1.0], [0, 0]
    yield [[nan], [0.0], [1.0]], [1.0], [0, 0, 0]
    yield [[nan], [nan]], [1.0], [0, 0]
    yield [[0.0], [1.0], [3.0]], [2.0], [0, 0, 0]
    yield [[0.0, 1.0], [1.0, nan], [0.5, 0.25]], [1.0, 0.5], [0, 0, 0]
    for size, functions, repeats in ((4, 1, 6), (6, 2, 6), (12, 3, 6), (64, 2, 2)):
        for _ in range(repeats):
            groups = [numbers.randrange(max(1, size // 4)) for _ in range(size)]
            weights = [numbers.choice((1.0, 0.5, 2.0, 0.0, 0.25)) for _ in range(functions)]
            lowest = numbers.choice((None, 0, -80))
            yield [[_reward(numbers, lowest) for _ in weights] for _ in groups], weights, groups


def _reward(numbers: random.Random, lowest: int | None) -> float:
    """Draw sixteenths from `lowest` on, exact in float32, as are their sums; None: 0 or 1. Some are NaN."""
    if numbers.random() < 0.15:
        return math.nan
    return float(numbers.randrange(2)) if lowest is None else numbers.randrange(lowest, 160) / 16


# -- Corrections -----------------------------------------------------------------------------------------


def compare_correction(correct: Correct, reference: Reference) -> None:
    """Compare weights and kept tokens of a correction with those of a reference; see `grpox.testing.same_as`.

    Raises:
        Violation: they differ.
    """
    for old, sampler, mask in _completions():
        weights, keep = correct(old, sampler, mask)
        named = {"old": old[0], "sampler": sampler[0], "mask": mask[0]}
        names = parameters_of(reference, named)
        there = torch.ones_like(mask[0]) if "mask" in names else mask[0]
        pairs = list(reference(**{name: named[name][there].tolist() for name in names}))
        lines = (f"{name:8}" + "  ".join(f"{value:.4g}" for value in each) for name, each in named.items())
        text = "\n".join(lines)
        places = there.nonzero().flatten().tolist()
        what = f"the reference returned {len(pairs)} results for {len(places)} tokens"
        require(len(pairs) == len(places), what, text)
        verb, (relative, absolute) = {True: "keeps", False: "drops"}, TOLERANCES["correction"]
        for place, (weight, is_wanted) in zip(places, pairs, strict=True):
            is_there, got = bool(keep[0, place]), weights[0, place].item()
            if not mask[0, place]:
                continue
            what = f"it {verb[is_there]} token {place}, which the reference {verb[bool(is_wanted)]}"
            require(is_there == bool(is_wanted), what, text)
            if is_there:
                what = f"token {place} weighs {got:.6g}, and by the reference {weight:.6g}"
                require(math.isclose(got, weight, rel_tol=relative, abs_tol=absolute), what, text)


def _completions() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield completions from one token up, as old, sampler and mask [1, T], zeros where masked."""
    for size in (0.0, 0.1, -0.1, 0.5, -0.5, 0.75, -0.75, 1.5, -1.5, 3.0, -3.0, 8.0, -8.0):
        yield _completion(torch.tensor([size], dtype=torch.float64), torch.ones(1, dtype=torch.bool))
    for (tokens, spread), seed in product(((2, 0.5), (3, 1.0), (6, 0.1), (6, 2.0), (40, 0.2)), range(4)):
        generator = torch.Generator().manual_seed(seed)
        difference = spread * torch.randn(tokens, generator=generator, dtype=torch.float64)
        mask = torch.ones(tokens, dtype=torch.bool)
        mask[1 + seed % tokens :: 3] = False
        yield _completion(difference, mask)


def _completion(difference: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    old = torch.where(mask, torch.linspace(-2.0, -10.0, len(mask), dtype=torch.float64), 0.0)
    sampler = torch.where(mask, old - difference, 0.0)
    return old.unsqueeze(0), sampler.unsqueeze(0), mask.unsqueeze(0)
