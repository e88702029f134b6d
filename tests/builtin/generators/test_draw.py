"""The draw of the next token: its distribution and log-probability; and the end of a completion by a text."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from grpox.contracts import Prompt
from grpox_generators.sampling import AT_A_TIME, StopTexts, draw_tokens, uniform_numbers
from grpox_generators.vllm_requests import seed_of

CPU = torch.device("cpu")
LENGTH = AT_A_TIME + 3


def uniform(rows):
    return torch.rand(rows, 1, dtype=torch.float64)


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
    tokens = torch.cat([draw_tokens(scores.expand(rows, -1), uniform(rows))[0] for _ in range(calls)])
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
    numbers = uniform(200)
    tokens, _, _ = draw_tokens(scores, numbers)
    sums = scores.softmax(-1).double().cumsum(-1) / scores.softmax(-1).double().sum(-1, keepdim=True)
    above = sums.gather(1, tokens[:, None])
    below = above - scores.softmax(-1).double().gather(1, tokens[:, None])
    assert (above > numbers - 1e-6).all()
    assert (below < numbers + 1e-6).all()


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53], ids=["least", "largest"])
@pytest.mark.parametrize(("size", "first", "end"), [(1000, 300, 700), (4, 1, 3)], ids=["blocks", "one sum"])
def test_the_ends_of_the_uniform_numbers_draw_no_forbidden_token(number, size, first, end):
    scores = torch.randn(1, size)
    scores[0, :first] = scores[0, end:] = -torch.inf
    token = int(draw_tokens(scores, torch.tensor([[number]], dtype=torch.float64))[0])
    assert first <= token < end
    assert size > 4 or token == (first if number == 0 else end - 1)


def test_the_log_probability_of_the_token_is_returned_drawn_or_likeliest():
    """log softmax of [0, log 3] is [log 1/4, log 3/4]."""
    torch.manual_seed(0)
    tokens, logprobs, _ = draw_tokens(torch.tensor([0.0, math.log(3)]).repeat(64, 1), uniform(64))
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, torch.tensor([1 / 4, 3 / 4]).log()[tokens])
    tokens, logprobs, _ = draw_tokens(torch.tensor([[0.0, math.log(3)], [math.log(7), 0.0]]), None)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([3 / 4, 7 / 8]))


def test_a_likely_token_of_a_large_vocabulary_makes_log_probabilities_no_less_exact():
    torch.manual_seed(0)
    scores = torch.randn(4, 50_000) * 2
    scores[:, 0] += 14
    tokens, logprobs, _ = draw_tokens(scores, uniform(4))
    expected = scores.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1).float()
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("broken", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]], ids=str)
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("size", [2, 1000])
def test_scores_that_are_no_distribution_are_reported(broken, greedy, size):
    sound = [0.0] * size
    for rows, is_sound in (([sound, broken * (size // 2)], False), ([sound, sound], True)):
        assert draw_tokens(torch.tensor(rows), None if greedy else uniform(2))[2] == is_sound


def prompt(seed, samples=2, group=0):
    return Prompt(group, (1,), samples, seed)


def test_a_prompt_has_its_numbers_in_any_company_and_leaves_the_global_ones():
    def numbers(*prompts):
        drawn = uniform_numbers(prompts, sum(each.num_samples for each in prompts), CPU)
        return torch.cat([next(drawn) for _ in range(LENGTH)], dim=1)  # f64[N, LENGTH]

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
    assert seed_of(prompt(7, group=3), 11) == 7  # vLLM draws by it


@pytest.mark.parametrize("seeds", [[], [None], [7, None]], ids=str)
def test_without_a_seed_of_each_prompt_the_call_decides(seeds):
    torch.manual_seed(1)
    drawn = next(uniform_numbers([prompt(seed) for seed in seeds], 4, CPU))
    torch.manual_seed(1)
    assert torch.equal(drawn, uniform(4))
    assert seed_of(prompt(None, group=3), 11) == np.random.SeedSequence([11, 3]).generate_state(1)[0]


PIECES = ["<pad>", "a", "b", "bc", "x", "STOP", " "]
PAD, A, B, BC, X, STOP, SPACE = range(7)


@pytest.fixture(scope="module")
def pieces():
    tokenizer = Tokenizer(WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


@pytest.fixture(scope="module")
def byte_tokens():
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def ends(tokenizer, texts, completions, min_length=0):
    """Look at each completion token by token, then at all tokens at once; the ends, 0 for none."""
    found = []
    for ids in completions:
        one_by_one, at_once = (StopTexts(texts, tokenizer, min_length) for _ in range(2))
        tails = [ids[max(0, n - one_by_one.window) : n] for n in range(1, len(ids) + 1)]
        each = [one_by_one.first_end(tail, length, 1) for length, tail in enumerate(tails, 1)]
        found.append(at_once.first_end(ids, len(ids), len(ids)))
        assert next(filter(None, each), 0) == found[-1]
    return found


@pytest.mark.parametrize(
    ("texts", "completions", "min_length", "expected"),
    [
        pytest.param(["ab"], [[X, A, B, X], [A, X, B, A]], 0, [3, 0], id="over two tokens"),
        pytest.param(["ab"], [[X, A, BC, X]], 0, [3], id="begins a token"),
        pytest.param(["TO"], [[X, STOP, X]], 0, [2], id="within a token"),
        pytest.param(["a", "b"], [[B, A, B], [X, X, A], [X, X, X]], 0, [1, 3, 0], id="the first end counts"),
        pytest.param(["ab"], [[A, B, X, X, A, B], [X, A, B, X, X, X]], 2, [6, 3], id="not before the minimum"),
        pytest.param(["aa"], [[A, A, A, X]], 2, [3], id="overlaps an earlier one"),
        pytest.param(["a "], [[X, A, SPACE, X]], 0, [3], id="white space"),
    ],
)
def test_a_completion_ends_with_the_token_that_completes_a_text(
    pieces, texts, completions, min_length, expected
):
    assert ends(pieces, texts, completions, min_length) == expected


def test_a_character_over_several_tokens_ends_with_its_last_byte_and_a_long_text_is_seen_whole(byte_tokens):
    ids = byte_tokens("né €.")["input_ids"]
    assert len(ids) == 8
    assert ends(byte_tokens, ["é"], [ids]) == [3]
    assert ends(byte_tokens, ["€"], [ids]) == [7]
    ids = byte_tokens("." * 30 + "the end of it")["input_ids"]
    assert ends(byte_tokens, ["the end of it"], [ids]) == [43]
