"""End of a completion by a text: tokens that share it, carry more than it, or hold part of a character."""

import pytest
import torch
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
    """Looks at the completions, of equal length, token by token, then at all tokens at once; the ends."""
    one_by_one, at_once = (StopTexts(texts, tokenizer, len(completions), min_length) for _ in range(2))
    rows = torch.tensor(completions)
    for length in range(1, rows.shape[1] + 1):
        done = one_by_one.look(rows[:, :length], 1)
        assert done.tolist() == [end is not None for end in one_by_one.ends]
    at_once.look(rows, rows.shape[1])
    assert at_once.ends == one_by_one.ends
    return at_once.ends


@pytest.mark.parametrize(
    ("texts", "completions", "min_length", "expected"),
    [
        (["ab"], [[X, A, B, X], [A, X, B, A]], 0, [3, None]),
        (["ab"], [[X, A, BC, X]], 0, [3]),
        (["TO"], [[X, STOP, X]], 0, [2]),
        (["a", "b"], [[B, A, B], [X, X, A], [X, X, X]], 0, [1, 3, None]),
        (["ab"], [[A, B, X, X, A, B], [X, A, B, X, X, X]], 2, [6, 3]),
        (["aa"], [[A, A, A, X]], 2, [3]),
        (["a "], [[X, A, SPACE, X]], 0, [3]),
        ([], [[A, B], [X, X]], 0, [None, None]),
    ],
    ids=[
        "over two tokens",
        "begins a token",
        "within a token",
        "the first end counts",
        "not before the minimum",
        "overlaps an earlier one",
        "white space",
        "none",
    ],
)
def test_a_completion_ends_with_the_token_that_completes_a_text(
    pieces, texts, completions, min_length, expected
):
    assert ends(pieces, texts, completions, min_length) == expected


def test_a_character_over_several_tokens_ends_with_its_last_byte(byte_tokens):
    ids = byte_tokens("né €.")["input_ids"]
    assert len(ids) == 8
    assert ends(byte_tokens, ["é"], [ids]) == [3]
    assert ends(byte_tokens, ["€"], [ids]) == [7]


def test_a_long_text_is_seen_whole(byte_tokens):
    ids = byte_tokens("." * 30 + "the end of it")["input_ids"]
    assert ends(byte_tokens, ["the end of it"], [ids]) == [43]


def test_rows_that_stay_keep_their_place(pieces):
    """Row 0 has ended and leaves; row 2 ends after it has moved up."""
    stops = StopTexts(["ab"], pieces, 3, 0)
    assert stops.look(torch.tensor([[A, B], [A, X], [X, A]]), 2).tolist() == [True, False, False]
    stops.keep(torch.tensor([False, True, True]))
    assert stops.look(torch.tensor([[A, X, X], [X, A, B]]), 1).tolist() == [False, True]
    assert stops.ends == [2, None, 3]
