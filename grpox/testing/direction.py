"""Checks of direction: which way a loss, an advantage and a correction push, and on which side they clip.

A formula with the wrong sign trains without an error. It shows on a few inputs whose outcome every algorithm of
policy gradients shares. A component that means something else declares it: a loss ``sign = "other"``, an
advantage or a correction ``monotone = False``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from grpox.contracts import LossInputs
from grpox.testing.conformance import require
from grpox.testing.loss_examples import measured_on, shown

NEAR = (0.0, 0.02, -0.02, 0.1, -0.1)
"""Log-ratios on policy and near it."""
FAR = (-1.0, 0.0, 1.0)
"""Log-ratios at which the gradient is reported."""
ROUNDING = 1e-9
Rewards = Sequence[Sequence[float]]
Scale = Callable[[Rewards, Sequence[float], Sequence[int]], Sequence[float]]
"""(rewards of N rows and K functions, K weights, N groups) -> N advantages."""
GROUPS: tuple[tuple[Rewards, Sequence[float], Sequence[int]], ...] = (
    ([[-1.0], [1.0]], [1.0], [0, 0]),
    ([[0.0], [1.0]], [1.0], [0, 0]),
    ([[1.0], [0.0]], [-1.0], [0, 0]),
    ([[0.0], [0.0], [1.0]], [1.0], [0, 0, 0]),
    ([[0.5], [2.0], [-1.0], [0.75]], [1.0], [0, 0, 0, 0]),
    ([[5.0], [0.0], [7.0], [1.0]], [1.0], [0, 1, 0, 1]),
    ([[0.0, 1.0], [1.0, 1.0], [1.0, 2.0], [0.0, 0.0]], [1.0, 0.5], [0, 0, 0, 0]),
)
"""From the smallest up. In each, the first group's rewards differ."""


def check_loss_sign(loss: Any, examples: Iterator[LossInputs], notes: list[str]) -> None:
    """Check that a step raises the probability of tokens with positive advantage, and lowers the others.

    Args:
        examples: from the smallest up, each all that the loss is given at once.
        notes: takes the gradient at some log-ratios.

    Raises:
        Violation: it does not, or it clips on the wrong side.
    """
    first = next(examples)
    notes.append(_describe_gradients(loss, first))
    if getattr(loss, "sign", "policy") == "other":
        raise SkipTest("it declares sign = 'other'")
    for inputs, advantage in product((first, *examples), (1.0, -1.0)):
        for log_ratio in NEAR:
            _check_direction(loss, _at(inputs, log_ratio, advantage), log_ratio)
    _check_side(loss, first)


def _check_direction(loss: Any, inputs: LossInputs, log_ratio: float) -> None:
    """Check every token's gradient: on policy it is not 0, and nowhere of the wrong sign."""
    gradient = measured_on(loss, inputs).gradient
    raises = torch.where(inputs.token_mask, -gradient * inputs.advantages.sign(), 1.0)  # f64[B, T]
    place = divmod(int(raises.argmin()), raises.shape[1])
    advantage = inputs.advantages[place].item()
    wanted, got = ("raises", "lowers") if advantage > 0 else ("lowers", "raises")
    example = shown(inputs, gradient=gradient)
    what = f"a step {got} the probability of a token with advantage {advantage:g}; policy gradient {wanted} it"
    advice = "check the sign: the loss is minimised. Where that is the point, declare sign = 'other'"
    require(raises[place].item() >= -ROUNDING, what, example, advice)
    if log_ratio == 0:
        what = f"on policy it does not train on a token with advantage {advantage:g}"
        advice = "a clip, a mask or a clamp drops it. Where that is the point, declare sign = 'other'"
        require(raises[place].item() > ROUNDING, what, example, advice)


def _check_side(loss: Any, inputs: LossInputs) -> None:
    """Check that tokens which moved against their advantage are not the only ones that are clipped."""

    def is_clipped(log_ratio: float, advantage: float) -> bool:
        return not bool((measured_on(loss, _at(inputs, log_ratio, advantage)).gradient != 0).any())

    is_wrong = all(is_clipped(-sign, sign) and not is_clipped(sign, sign) for sign in (1.0, -1.0))
    what = "it clips tokens that moved against their advantage, and goes on with those that moved with it"
    advice = "the surrogate is the smaller of both branches: -torch.min(ratio * A, clipped * A)"
    require(not is_wrong, what, shown(_at(inputs, -1.0, 1.0)), advice)


def _describe_gradients(loss: Any, inputs: LossInputs) -> str:
    texts = []
    for advantage in (1.0, -1.0):
        gradients = [measured_on(loss, _at(inputs, ratio, advantage)).gradient[0, 0].item() for ratio in FAR]
        texts.append(f"{'  '.join(f'{gradient:.3g}' for gradient in gradients)} for A = {advantage:g}")
    return f"d loss / d log pi at log-ratios {', '.join(f'{ratio:g}' for ratio in FAR)}: {'; '.join(texts)}"


def _at(inputs: LossInputs, log_ratio: float, advantage: float) -> LossInputs:
    """Move the inputs to a log-ratio and an advantage, the same at all tokens; the correction weighs 1."""
    weights, mask = inputs.correction_weights, inputs.token_mask
    return replace(
        inputs,
        logprobs=torch.where(mask, inputs.old_logprobs + log_ratio, 0.0),
        advantages=torch.where(mask, torch.full_like(inputs.advantages, advantage), 0.0),
        correction_weights=None if weights is None else torch.where(mask, torch.ones_like(weights), 0.0),
    )


def check_monotone(scale: Scale, is_declared: bool, needs_nonnegative: bool = False) -> None:
    """Check that a better reward within a group gives no smaller advantage, and that 0 is between.

    With several functions, a completion is better that no function rates lower, each by the sign of its weight.

    Args:
        is_declared: the scaler declares ``monotone = False``.
        needs_nonnegative: it refuses negative rewards, and is given none.

    Raises:
        Violation: it does.
    """
    if is_declared:
        raise SkipTest("it declares monotone = False")
    advice = "check the sign: A grows with the reward. Where that is not the point, declare monotone = False"
    batches = [each for each in GROUPS if not needs_nonnegative or _is_nonnegative(*each[:2])]
    for rewards, weights, groups in batches:
        advantages = scale(rewards, weights, groups)
        example = describe_batch(rewards, weights, groups, advantages)
        for worse, better in permutations(range(len(rewards)), 2):
            is_pair = groups[worse] == groups[better] and _dominates(rewards[better], rewards[worse], weights)
            is_right = advantages[better] >= advantages[worse] - 1e-6
            what = f"row {better} has a better reward than row {worse} of its group, and a smaller advantage"
            require(is_right or not is_pair, what, example, advice)
    rewards, weights, groups = batches[0]
    worst, best = scale(rewards, weights, groups)
    example = describe_batch(rewards, weights, groups, (worst, best))
    what = f"a worse and a better reward get advantages {worst:g} and {best:g}, not around 0"
    # A baseline may be one of the rewards, as a quantile is.
    require(worst <= 0 <= best and worst < best, what, example, advice)


def _is_nonnegative(rewards: Rewards, weights: Sequence[float]) -> bool:
    return all(sum(w * r for w, r in zip(weights, row, strict=True)) >= 0 for row in rewards)


def _dominates(better: Sequence[float], worse: Sequence[float], weights: Sequence[float]) -> bool:
    gains = [weight * (high - low) for weight, high, low in zip(weights, better, worse, strict=True)]
    return min(gains) >= 0 and max(gains) > 0


def describe_batch(
    rewards: Rewards, weights: Sequence[float], groups: Sequence[int], advantages: Sequence[float] = ()
) -> str:
    """Write a generation batch as text, a line for each completion."""
    lines = [
        f"row {row}  group {group}  rewards {'  '.join(f'{reward:g}' for reward in values)}"
        + (f"  advantage {advantages[row]:.6g}" if advantages else "")
        for row, (group, values) in enumerate(zip(groups, rewards, strict=True))
    ]
    return "\n".join([*lines, f"weights {'  '.join(f'{weight:g}' for weight in weights)}"])


Correct = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(old, sampler, mask) [B, T] -> weights, keep [B, T]."""
