"""Choice of the tokens with the highest entropy: worked by hand, at ties, and for any micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from grpox.runtime.world import World
from grpox.update.token_masks import choose, threshold

ALONE = World(0, 1, torch.device("cpu"))


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


def chosen(*entropies: torch.Tensor, part: float) -> list[torch.Tensor]:
    """The tokens of the micro-batches that are kept; none is masked."""
    return choose(entropies, [torch.arange(each.numel()) for each in entropies], part, ALONE)[0]


@pytest.mark.parametrize(
    ("part", "least"),
    [(1.0, 1.0), (0.75, 2.0), (0.5, 3.0), (0.4, 4.0), (0.25, 4.0), (0.1, 5.0), (0.0, 5.0)],
)
def test_of_five_entropies_by_hand(part: float, least: float) -> None:
    """quantile(0.6) lies between 3 and 4, at 3.4, and quantile(0.9) at 4.6: what is above begins at 4 and 5."""
    assert threshold(values(3, 1, 5, 2, 4), part) == least


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 2, 11, 21, 100])
def test_the_tokens_are_those_at_or_above_torchs_quantile(part: float, count: int) -> None:
    entropies = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    kept = entropies >= threshold(entropies, part)
    # A little below, as torch's own place of the quantile is rounded.
    expected = entropies >= torch.quantile(entropies, 1 - part) - 1e-12
    assert torch.equal(kept, expected)


def test_a_part_is_the_decimal_number_that_was_written() -> None:
    """1 - 0.7 in floating point is more than 0.3, whose quantile of eleven is exactly the fourth."""
    assert threshold(torch.arange(11.0), 0.7) == 3


def test_equal_entropies_are_kept_together() -> None:
    (keep,) = chosen(values(1, 2, 2, 2).view(1, 4), part=0.25)
    assert keep.tolist() == [[False, True, True, True]]


@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 0.6])
def test_entropies_that_differ_by_rounding_are_equal(part: float) -> None:
    entropies = values(1, 2, 2 + 1e-5, 2 - 1e-5).view(1, 4)
    (keep,) = chosen(entropies, part=part)
    assert keep.tolist() == [[False, True, True, True]]


def test_what_is_masked_takes_no_part() -> None:
    entropies = torch.tensor([[1.0, 9.0, 2.0], [9.0, 3.0, 4.0]])
    mask = torch.tensor([[True, False, True], [False, True, True]])
    [keep], metrics = choose([entropies], [torch.tensor([0, 2, 4, 5])], 0.5, ALONE)
    # quantile(0.5) of [1, 2, 3, 4] is 2.5
    assert (keep & mask).tolist() == [[False, False, False], [False, True, True]]
    assert metrics == {"top_entropy/threshold": 3, "top_entropy/kept": 0.5}


def test_the_choice_is_that_of_the_step_and_not_of_its_micro_batches() -> None:
    kept = chosen(values(1, 2).view(1, 2), values(3, 4).view(1, 2), part=0.5)
    assert [keep.tolist() for keep in kept] == [[[False, False]], [[True, True]]]


def test_a_step_without_tokens_chooses_none_and_tells_nothing() -> None:
    assert choose([torch.zeros(2, 3)], [torch.arange(0)], 0.2, ALONE)[1] == {}


def test_an_entropy_that_is_nan_stays_to_be_found_in_the_loss() -> None:
    (keep,) = chosen(values(1, math.nan, 2, 3).view(1, 4), part=0.1)
    assert keep.tolist() == [[False, True, False, True]]
    (keep,) = chosen(torch.full((1, 4), math.nan), part=0.1)
    assert keep.all()
