"""Tokens of the highest entropy, and completions that are off-policy: by hand and at the bounds."""

from __future__ import annotations

import math

import pytest
import torch

from grpox.runtime.world import World
from grpox.update.token_masks import choose, off_policy_keep, threshold

ALONE = World(0, 1, torch.device("cpu"))
NAN = math.nan


def chosen(*entropies: list[float], part: float) -> list[list[bool]]:
    """The tokens that are kept of micro-batches of one row each; none is masked."""
    rows = [torch.tensor([each]) for each in entropies]
    kept = choose(rows, [torch.arange(each.numel()) for each in rows], part, ALONE)[0]
    return [each[0].tolist() for each in kept]


@pytest.mark.parametrize(
    ("part", "least"),
    [(1.0, 1.0), (0.75, 2.0), (0.5, 3.0), (0.4, 4.0), (0.25, 4.0), (0.1, 5.0), (0.0, 5.0)],
)
def test_of_five_entropies_by_hand(part: float, least: float) -> None:
    """quantile(0.6) lies between 3 and 4, at 3.4, and quantile(0.9) at 4.6: what is above begins at 4 and 5."""
    assert threshold(torch.tensor([3.0, 1.0, 5.0, 2.0, 4.0]), part) == least


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 2, 11, 21, 100])
def test_the_tokens_are_those_at_or_above_torchs_quantile(part: float, count: int) -> None:
    entropies = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    kept = entropies >= threshold(entropies, part)
    # A little below, as torch's own place of the quantile is rounded.
    assert torch.equal(kept, entropies >= torch.quantile(entropies, 1 - part) - 1e-12)


def test_a_part_is_the_decimal_number_that_was_written() -> None:
    """1 - 0.7 in floating point is more than 0.3, whose quantile of eleven is exactly the fourth."""
    assert threshold(torch.arange(11.0), 0.7) == 3


@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 0.6])
def test_entropies_that_differ_by_rounding_are_kept_together(part: float) -> None:
    assert chosen([1.0, 2.0, 2 + 1e-5, 2 - 1e-5], part=part) == [[False, True, True, True]]


def test_the_choice_is_that_of_the_step_and_what_is_masked_takes_no_part() -> None:
    assert chosen([1.0, 2.0], [3.0, 4.0], part=0.5) == [[False, False], [True, True]]
    entropies, places = torch.tensor([[1.0, 9.0, 2.0], [9.0, 3.0, 4.0]]), torch.tensor([0, 2, 4, 5])
    [keep], metrics = choose([entropies], [places], 0.5, ALONE)
    # quantile(0.5) of [1, 2, 3, 4] is 2.5
    assert keep.flatten()[places].tolist() == [False, False, True, True]
    assert metrics == {"top_entropy/threshold": 3, "top_entropy/kept": 0.5}
    assert choose([torch.zeros(2, 3)], [torch.arange(0)], 0.2, ALONE)[1] == {}


def test_an_entropy_that_is_nan_stays_to_be_found_in_the_loss() -> None:
    assert chosen([1.0, NAN, 2.0, 3.0], part=0.1) == [[False, True, False, True]]
    assert chosen([NAN] * 4, part=0.1) == [[True] * 4]


# -- Completions that are off-policy ---------------------------------------------------------------------

MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
LOGPROBS = torch.tensor([[-2.0, -3.0, 0.0], [-1.0, -1.0, -4.0], [0.0, 0.0, 0.0]])
SAMPLER = torch.tensor([[-1.0, -2.5, NAN], [-1.0, -1.5, -3.0], [0.0, 0.0, 0.0]])
"""Differences [1, 0.5] and [0, -0.5, 1]: 0.75 and 1/6 nats per token."""
UNKNOWN = torch.where(SAMPLER == -1.0, NAN, SAMPLER)
"""0.5 nats over the two tokens of the first: what is not known counts as no distance."""


@pytest.mark.parametrize(
    ("threshold", "advantages", "sampler", "expected"),
    [
        (0.75, [-1.0] * 3, SAMPLER, [True, True, True]),
        (0.74, [-1.0] * 3, SAMPLER, [False, True, True]),
        (0.1, [-1.0] * 3, SAMPLER, [False, False, True]),
        (0.0, [0.0, 2.0, -1.0], SAMPLER, [True, True, True]),  # without a negative advantage, however far
        (0.25, [-1.0] * 3, UNKNOWN, [True, True, True]),
        (0.24, [-1.0] * 3, UNKNOWN, [False, True, True]),
        (0.0, [-1.0] * 3, None, [True, True, True]),
        (0.7, [-1.0] * 3, torch.where(MASK, SAMPLER, 1e30), [False, True, True]),
    ],
)
def test_a_completion_is_kept_or_dropped_as_a_whole(
    threshold: float, advantages: list[float], sampler: torch.Tensor | None, expected: list[bool]
) -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    for given in (torch.tensor(advantages), torch.tensor(advantages)[:, None].expand(3, 3)):
        keep = off_policy_keep(logprobs, sampler, given, MASK, threshold)
        assert keep.tolist() == [[each] * 3 for each in expected]
        assert not keep.requires_grad
    of_one_token = off_policy_keep(logprobs[:1, :1], SAMPLER[:1, :1], -torch.ones(1), MASK[:1, :1], 0.9)
    assert of_one_token.tolist() == [[False]]


def test_a_completion_that_the_policy_finds_likelier_or_not_a_number_is_kept() -> None:
    """The distance has a sign, and a NaN is left to the loss to tell."""
    assert off_policy_keep(SAMPLER.nan_to_num(), LOGPROBS, -torch.ones(3), MASK, 0.0).all()
    logprobs = torch.where(LOGPROBS == -3.0, NAN, LOGPROBS)
    assert off_policy_keep(logprobs, SAMPLER, -torch.ones(3), MASK, 0.0)[0].all()
