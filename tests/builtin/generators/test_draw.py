"""The draw of the next token: its distribution, what is recorded of it, and rows that leave."""

import math
from itertools import repeat

import numpy as np
import pytest
import torch

from grpox.contracts import Prompt
from grpox_generators.sampling import AT_A_TIME, Draw, NoProbabilities, own_uniform, seed_of

CPU = torch.device("cpu")
LENGTH = AT_A_TIME + 3


@pytest.mark.parametrize(
    ("size", "forbidden", "calls", "largest"),
    [(100, [0, 99], 1, 170), (1000, range(256, 300), 25, 1200)],
    ids=["one sum", "blocks"],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(size, forbidden, calls, largest):
    """400,000 draws at least: chi-square is below `largest` but once in 10^5 times."""
    torch.manual_seed(0)
    scores = torch.randn(1, size)
    scores[0, list(forbidden)] = -torch.inf
    rows = 40_000 if calls > 1 else 400_000
    tokens = torch.cat([Draw(rows, 1, False, CPU).take(scores.expand(rows, -1)) for _ in range(calls)])
    expected = scores[0].double().softmax(-1) * len(tokens)
    counts = tokens.bincount(minlength=size)
    assert not counts[list(forbidden)].any()
    possible = expected > 0
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < largest


@pytest.mark.parametrize("size", [512, 700, 50_000])
def test_in_blocks_the_token_is_that_of_one_cumulated_sum(size):
    """Apart from numbers within float32's rounding of a boundary."""
    torch.manual_seed(0)
    scores = torch.randn(200, size) * 2
    uniform = torch.rand(200, 1, dtype=torch.float64)
    tokens = Draw(200, 1, False, CPU, repeat(uniform)).take(scores)
    sums = scores.softmax(-1).double().cumsum(-1) / scores.softmax(-1).double().sum(-1, keepdim=True)
    above = sums.gather(1, tokens[:, None])
    below = above - scores.softmax(-1).double().gather(1, tokens[:, None])
    assert (above > uniform - 1e-6).all()
    assert (below < uniform + 1e-6).all()


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53], ids=["least", "largest"])
@pytest.mark.parametrize(("size", "first", "end"), [(1000, 300, 700), (4, 1, 3)], ids=["blocks", "one sum"])
def test_the_ends_of_the_uniform_numbers_draw_no_forbidden_token(number, size, first, end):
    scores = torch.randn(1, size)
    scores[0, :first] = scores[0, end:] = -torch.inf
    uniform = torch.tensor([[number]], dtype=torch.float64)
    token = int(Draw(1, 1, False, CPU, repeat(uniform)).take(scores))
    assert first <= token < end
    assert size > 4 or token == (first if number == 0 else end - 1)


def test_the_log_probability_of_the_token_drawn_is_recorded_at_its_place():
    """log softmax of [0, log 3] is [log 1/4, log 3/4], of equal scores log 1/2."""
    torch.manual_seed(0)
    draw = Draw(64, 2, False, CPU)
    first = draw.take(torch.tensor([0.0, math.log(3)]).repeat(64, 1))
    draw.take(torch.zeros(64, 2))
    assert set(first.tolist()) == {0, 1}
    expected = torch.tensor([1 / 4, 3 / 4]).log()[first]
    torch.testing.assert_close(draw.logprobs, torch.stack([expected, torch.full((64,), -math.log(2))], dim=1))


def test_a_likely_token_of_a_large_vocabulary_makes_log_probabilities_no_less_exact():
    torch.manual_seed(0)
    scores = torch.randn(4, 50_000) * 2
    scores[:, 0] += 14
    draw = Draw(4, 1, False, CPU)
    tokens = draw.take(scores)
    expected = scores.double().log_softmax(-1).gather(1, tokens[:, None]).float()
    torch.testing.assert_close(draw.logprobs, expected, atol=2e-6, rtol=0)


def test_greedy_takes_the_likeliest_and_tells_its_probability():
    draw = Draw(2, 1, True, CPU)
    assert draw.take(torch.tensor([[0.0, math.log(3)], [math.log(7), 0.0]])).tolist() == [1, 0]
    torch.testing.assert_close(draw.logprobs.exp(), torch.tensor([[3 / 4], [7 / 8]]))


def test_a_row_draws_the_same_whether_or_not_others_have_left():
    scores = torch.zeros(6, 1000)
    whole, left = Draw(6, 2, False, CPU), Draw(6, 2, False, CPU)
    torch.manual_seed(3)
    whole.take(scores)
    expected = whole.take(scores)
    torch.manual_seed(3)
    left.take(scores)
    left.keep(torch.tensor([False, True, True, False, True, True]))
    left.keep(torch.tensor([True, False, True, True]))
    assert left.take(scores[:3]).tolist() == expected[[1, 4, 5]].tolist()
    assert (left.logprobs[:, 1] != 0).tolist() == [False, True, False, False, True, True]


@pytest.mark.parametrize("broken", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]], ids=str)
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("size", [2, 1000])
def test_scores_that_are_no_distribution_are_found_at_the_next_look(broken, greedy, size):
    draw = Draw(2, 2, greedy, CPU)
    draw.take(torch.tensor([[0.0, 0.0], broken]).repeat(1, size // 2))
    draw.take(torch.zeros(2, size))
    with pytest.raises(NoProbabilities):
        draw.look(torch.tensor([False, True]))


def test_a_look_returns_the_share_of_rows_that_have_ended():
    draw = Draw(4, 1, False, CPU)
    draw.take(torch.zeros(4, 2))
    assert draw.look(torch.tensor([False, True, False, False])) == 0.25


def numbers(*prompts):
    """f64[N, LENGTH]."""
    uniform = own_uniform(prompts, CPU)
    return torch.cat([next(uniform) for _ in range(LENGTH)], dim=1)


def prompt(seed, samples=2, group=0):
    return Prompt(group, (1,), samples, seed)


def test_a_prompt_has_its_numbers_in_any_company_and_leaves_the_global_ones():
    torch.manual_seed(1)
    together = numbers(prompt(7), prompt(8, 3, 1), prompt(9, 2, 2))
    after = torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4), after)
    alone = numbers(prompt(8, 3, 5))
    assert torch.equal(together[2:5], alone)
    assert len(alone.unique()) == alone.numel()  # neither samples nor tokens share one
    assert not torch.equal(numbers(prompt(7)), numbers(prompt(8)))
    assert 0 <= alone.min() < alone.max() < 1


@pytest.mark.parametrize("seeds", [[], [None], [7, None]], ids=str)
def test_without_a_seed_of_each_prompt_the_call_decides(seeds):
    assert own_uniform([prompt(seed) for seed in seeds], CPU) is None


def test_a_row_draws_by_its_own_numbers_after_others_have_left():
    scores = torch.zeros(4, 1000)

    def tokens(*prompts, left=0):
        rows = sum(each.num_samples for each in prompts)
        draw = Draw(rows, 2, False, CPU, own_uniform(prompts, CPU))
        draw.take(scores[:rows])
        draw.keep(torch.arange(rows) >= left)
        return draw.take(scores[left:rows]).tolist()

    assert tokens(prompt(7), prompt(8), left=2) == tokens(prompt(8))


def test_vllm_takes_the_prompts_own_seed():
    assert seed_of(prompt(7, group=3), 11) == 7
    assert seed_of(prompt(None, group=3), 11) == np.random.SeedSequence([11, 3]).generate_state(1)[0]
