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


def ends(tokenizer, texts, completions, prompt=(X,), min_length=0):
    """Feeds the completions, of equal length, token by token; the end of each."""
    criterion = StopTexts(texts, tokenizer, len(completions), len(prompt), min_length)
    rows = torch.tensor([[*prompt, *completion] for completion in completions])
    for length in range(1, len(completions[0]) + 1):
        done = criterion(rows[:, : len(prompt) + length], None)
        assert done.tolist() == [end is not None for end in criterion.ends]
    return criterion.ends


def test_a_text_over_two_tokens_ends_with_the_second(pieces):
    assert ends(pieces, ["ab"], [[X, A, B, X], [A, X, B, A]]) == [3, None]


def test_a_token_may_carry_more_than_the_text(pieces):
    assert ends(pieces, ["ab"], [[X, A, BC, X]]) == [3]
    assert ends(pieces, ["TO"], [[X, STOP, X]]) == [2]


def test_each_row_keeps_its_first_end(pieces):
    assert ends(pieces, ["a", "b"], [[B, A, B], [X, X, A], [X, X, X]]) == [1, 3, None]


def test_a_text_begun_in_the_prompt_does_not_count(pieces):
    assert ends(pieces, ["ab"], [[B, X], [A, B]], prompt=(X, A)) == [None, 2]


def test_a_text_completed_before_the_minimum_does_not_count(pieces):
    assert ends(pieces, ["ab"], [[A, B, X, X, A, B], [X, A, B, X, X, X]], min_length=2) == [6, 3]


def test_a_text_that_overlaps_an_earlier_one_counts_by_itself(pieces):
    """Three times a holds aa twice; the first, of two tokens, comes too early."""
    assert ends(pieces, ["aa"], [[A, A, A, X]], min_length=2) == [3]


def test_a_text_of_white_space_is_found(pieces):
    assert ends(pieces, ["a "], [[X, A, SPACE, X]]) == [3]


def test_a_character_over_several_tokens_ends_with_its_last_byte(byte_tokens):
    ids = byte_tokens("né €.")["input_ids"]
    assert len(ids) == 8
    assert ends(byte_tokens, ["é"], [ids], prompt=ids[:1]) == [3]
    assert ends(byte_tokens, ["€"], [ids], prompt=ids[:1]) == [7]


def test_a_long_text_is_seen_whole(byte_tokens):
    ids = byte_tokens("." * 30 + "the end of it")["input_ids"]
    assert ends(byte_tokens, ["the end of it"], [ids], prompt=ids[:1]) == [43]


def test_without_texts_nothing_ends(pieces):
    assert ends(pieces, [], [[A, B], [X, X]]) == [None, None]


def test_rows_that_stay_keep_their_place(pieces):
    """Row 0 has ended and leaves; row 2 ends after it has moved up."""
    criterion = StopTexts(["ab"], pieces, 3, 1, 0)
    assert criterion(torch.tensor([[X, A, B], [X, A, X], [X, X, A]]), None).tolist() == [True, False, False]
    criterion.keep(torch.tensor([False, True, True]))
    assert criterion(torch.tensor([[X, A, X, X], [X, X, A, B]]), None).tolist() == [False, True]
    assert criterion.ends == [2, None, 3]
