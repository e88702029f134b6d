"""End of a completion by a text: tokens that share it, carry more than it, or hold part of a character."""

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from grpox_generators.sampling import StopTexts

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
