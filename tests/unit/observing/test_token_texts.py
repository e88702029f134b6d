"""The texts of tokens put together are the completion, for every kind of decoder."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpox.observing.token_files import TokenTexts

WORDS = ["the", "quick", "a", ".", ",", "é", "naïve"]


def bytewise() -> PreTrainedTokenizerFast:
    """Every byte a token, as the rare characters of most models, and a few words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finished(tokenizer)


def pieces() -> PreTrainedTokenizerFast:
    """Words with a mark for the space before them, which the first of a text loses; other bytes by number."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(f"▁{word}" for word in WORDS), *WORDS]
    tokenizer = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return finished(tokenizer)


def word_pieces() -> PreTrainedTokenizerFast:
    """Words parted by spaces, which the decoder leaves out before a full stop or comma."""
    names = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS)]
    tokenizer = Tokenizer(
        models.WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return finished(tokenizer)


def finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    made.add_tokens([AddedToken("<|turn|>", special=True), AddedToken("<call>", special=False)])
    return made


KINDS: dict[str, Callable[[], Any]] = {"bytes": bytewise, "pieces": pieces, "words": word_pieces}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_put_together_are_the_completion(kind: str) -> None:
    tokenizer = KINDS[kind]()
    texts, chance = TokenTexts(tokenizer), random.Random(0)
    ids = list(range(len(tokenizer)))
    for length in [0, 1, 2, *range(3, 40)]:  # most of these are no valid UTF-8
        completion = chance.choices(ids, k=length)
        found = texts.of(completion)
        assert len(found) == length
        assert "".join(found) == tokenizer.decode(completion, skip_special_tokens=True)


def test_a_character_that_is_split_is_the_text_of_its_last_token() -> None:
    tokenizer = bytewise()
    ids = tokenizer("né 🙂!")["input_ids"]
    assert len(ids) == 9
    assert TokenTexts(tokenizer).of(ids) == ["n", "", "é", " ", "", "", "", "🙂", "!"]


def test_a_space_belongs_to_the_word_behind_it() -> None:
    tokenizer = pieces()
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁quick", ".", "<|end|>", "▁a"])
    assert TokenTexts(tokenizer).of(ids) == ["the", " quick", ".", "", " a"]


def test_special_tokens_have_no_text_and_a_name() -> None:
    tokenizer = bytewise()
    end, turn, call = tokenizer.convert_tokens_to_ids(["<|end|>", "<|turn|>", "<call>"])
    texts = TokenTexts(tokenizer)
    assert texts.of([turn, call, end]) == ["", "<call>", ""]
    assert [texts.special(each) for each in (turn, call, end, 5)] == ["<|turn|>", None, "<|end|>", None]
