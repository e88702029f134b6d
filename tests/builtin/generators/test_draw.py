"""The draw of the next token: its distribution, what is recorded of it, and rows that leave."""

import math

import pytest
import torch

from grpox_generators.sampling import Draw, NoProbabilities

CPU = torch.device("cpu")


def drawn(draw, scores):
    """Return the token that a greedy generate takes: the one of the largest score."""
    return draw(torch.zeros(len(scores), 1, dtype=torch.long), scores.clone()).argmax(dim=-1)


def test_tokens_are_drawn_as_often_as_their_probability_says():
    """98 tokens and two forbidden ones, 400,000 draws: chi-square is below 170 but once in 10^5 times."""
    torch.manual_seed(0)
    scores = torch.randn(1, 100) * 2
    scores[0, 0] = scores[0, 99] = -torch.inf
    tokens = drawn(Draw(400_000, 1, False, CPU), scores.expand(400_000, -1))
    expected = scores[0].double().softmax(-1) * 400_000
    counts = tokens.bincount(minlength=100)
    assert counts[[0, 99]].tolist() == [0, 0]
    assert ((counts - expected)[1:99] ** 2 / expected[1:99]).sum() < 170


def test_a_vocabulary_in_blocks_is_drawn_from_as_its_probabilities_say():
    """1,000 tokens in four blocks, 10^6 draws: chi-square is below 1,200 but once in 10^5 times."""
    torch.manual_seed(0)
    scores = torch.randn(1, 1000)
    scores[0, 256:300] = -torch.inf
    tokens = torch.cat([Draw(10_000, 1, False, CPU).take(scores.expand(10_000, -1)) for _ in range(100)])
    expected = scores[0].double().softmax(-1) * 1_000_000
    counts = tokens.bincount(minlength=1000)
    assert not counts[256:300].any()
    possible = expected > 0
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < 1200


@pytest.mark.parametrize("size", [512, 700, 50_000])
def test_in_blocks_the_token_is_that_of_one_cumulated_sum(size):
    """Apart from numbers within float32's rounding of a boundary."""
    torch.manual_seed(0)
    scores = torch.randn(200, size) * 2
    uniform = torch.rand(200, 1, dtype=torch.float64)
    tokens = Draw(200, 1, False, CPU, lambda: uniform).take(scores)
    sums = scores.softmax(-1).double().cumsum(-1) / scores.softmax(-1).double().sum(-1, keepdim=True)
    above = sums.gather(1, tokens[:, None])
    below = above - scores.softmax(-1).double().gather(1, tokens[:, None])
    assert (above > uniform - 1e-6).all()
    assert (below < uniform + 1e-6).all()


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_in_blocks_the_ends_of_the_uniform_numbers_draw_no_forbidden_token(number):
    scores = torch.randn(1, 1000)
    scores[0, :300] = scores[0, 700:] = -torch.inf
    uniform = torch.tensor([[number]], dtype=torch.float64)
    assert 300 <= int(Draw(1, 1, False, CPU, lambda: uniform).take(scores)) < 700


def test_scores_that_are_no_distribution_are_found_at_the_next_look():
    draw = Draw(1, 2, False, CPU)
    draw.take(torch.full((1, 1000), math.nan))
    draw.take(torch.zeros(1, 1000))
    with pytest.raises(NoProbabilities):
        draw.check()


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2**-53, 2)], ids=["least", "largest"])
def test_the_ends_of_the_uniform_numbers_draw_no_forbidden_token(monkeypatch, uniform, token):
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(shape, uniform, **options))
    scores = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf]])
    assert drawn(Draw(1, 1, False, CPU), scores).tolist() == [token]


def test_the_log_probability_of_the_token_drawn_is_recorded_at_its_place():
    """log softmax of [0, log 3] is [log 1/4, log 3/4], of equal scores log 1/2."""
    torch.manual_seed(0)
    draw = Draw(64, 2, False, CPU)
    first = drawn(draw, torch.tensor([0.0, math.log(3)]).repeat(64, 1))
    drawn(draw, torch.zeros(64, 2))
    assert set(first.tolist()) == {0, 1}
    expected = torch.tensor([1 / 4, 3 / 4]).log()[first]
    torch.testing.assert_close(draw.logprobs, torch.stack([expected, torch.full((64,), -math.log(2))], dim=1))


def test_a_likely_token_of_a_large_vocabulary_makes_log_probabilities_no_less_exact():
    torch.manual_seed(0)
    scores = torch.randn(4, 50_000) * 2
    scores[:, 0] += 14
    draw = Draw(4, 1, False, CPU)
    tokens = drawn(draw, scores)
    expected = scores.double().log_softmax(-1).gather(1, tokens[:, None]).float()
    torch.testing.assert_close(draw.logprobs, expected, atol=2e-6, rtol=0)


def test_greedy_takes_the_likeliest_and_tells_its_probability():
    draw = Draw(2, 1, True, CPU)
    assert drawn(draw, torch.tensor([[0.0, math.log(3)], [math.log(7), 0.0]])).tolist() == [1, 0]
    torch.testing.assert_close(draw.logprobs.exp(), torch.tensor([[3 / 4], [7 / 8]]))


def test_a_row_draws_the_same_whether_or_not_others_have_left():
    scores = torch.zeros(6, 1000)
    whole, left = Draw(6, 2, False, CPU), Draw(6, 2, False, CPU)
    torch.manual_seed(3)
    drawn(whole, scores)
    expected = drawn(whole, scores)
    torch.manual_seed(3)
    drawn(left, scores)
    left.keep(torch.tensor([False, True, True, False, True, True]))
    left.keep(torch.tensor([True, False, True, True]))
    assert drawn(left, scores[:3]).tolist() == expected[[1, 4, 5]].tolist()
    assert (left.logprobs[:, 1] != 0).tolist() == [False, True, False, False, True, True]


@pytest.mark.parametrize("broken", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]], ids=str)
@pytest.mark.parametrize("greedy", [False, True])
def test_scores_that_are_no_distribution_are_told(broken, greedy):
    with pytest.raises(NoProbabilities):
        drawn(Draw(2, 1, greedy, CPU), torch.tensor([[0.0, 0.0], broken]))
