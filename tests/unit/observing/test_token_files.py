"""Files of tokens are read back with None for what was not computed, and texts that make up the completion."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from support.watched_runs import record_tokens, token_facts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpox.observing.token_files import TokenTexts, read_tokens, token_file


def test_a_token_is_read_back_with_all_its_token_facts(tmp_path: Path) -> None:
    unknown = token_facts(sample=1)
    unknown.sampler_logprob[-1] = np.nan
    record_tokens(tmp_path, 1, unknown, token_facts(sample=0, ids=(3,)))
    first, observation, third, last = read_tokens(tmp_path, 1, 0, 1)
    assert first == {
        "id": 7, "text": "<7>", "special": None, "logprob": 0.0, "policy_logprob": -0.25, "ratio": 1.0,
        "advantage": 0.5, "entropy": 0.0, "correction": 1.0, "mask": 1, "turn": 0, "kind": "model",
    }  # fmt: skip
    assert observation == {
        "id": 8, "text": "<8>", "special": None, "logprob": None, "policy_logprob": None, "ratio": None,
        "advantage": None, "entropy": None, "correction": None, "mask": 0, "turn": None, "kind": "observation",
    }  # fmt: skip
    assert (third["mask"], third["ratio"], third["turn"]) == (0, 3.0, 1)
    assert (last["special"], last["text"], last["logprob"]) == ("<end>", "", None)
    assert [each["id"] for each in read_tokens(tmp_path, 1, 0, 0)] == [3]
    odd = token_facts(4)
    odd.logprob[:] = [-np.inf, 0, np.nan, np.inf]
    record_tokens(tmp_path, 4, odd)
    tokens = read_tokens(tmp_path, 4, 0, 0)
    assert [each["policy_logprob"] for each in tokens] == [None] * 4
    json.dumps(tokens, allow_nan=False)


def test_a_completion_is_found_by_the_name_of_its_file_whichever_step_trained_on_it(tmp_path: Path) -> None:
    assert read_tokens(tmp_path, 1, 5, 0) == []
    record_tokens(tmp_path, 1, token_facts(1, 1, 5), token_facts(1, 2, 5, ids=(4,)))
    record_tokens(tmp_path, 2, token_facts(1, 1, 6))  # the second step of the same generation batch
    record_tokens(tmp_path, 3, token_facts(3, 1, 5, ids=(1, 2)))
    assert len(read_tokens(tmp_path, 1, 5, 0, part=2)) == 1
    names = ((1, 5), (1, 6), (3, 5), (1, 7), (2, 6))
    assert [len(read_tokens(tmp_path, step, group, 0)) for step, group in names] == [4, 4, 2, 0, 0]


def test_a_search_ends_at_the_next_generation_batch(tmp_path: Path) -> None:
    record_tokens(tmp_path, 3, token_facts(3))
    token_file(tmp_path, 4).write_text("no parquet")
    assert read_tokens(tmp_path, 1, 0, 0) == []
    with pytest.raises(pyarrow.ArrowInvalid):
        read_tokens(tmp_path, 4, 0, 0)


@pytest.mark.parametrize("column", ["special", "id", "mask"])
def test_an_error_of_tokens_names_their_file(tmp_path: Path, column: str) -> None:
    record_tokens(tmp_path, 1, token_facts(1, 1, 5))
    path = token_file(tmp_path, 1)
    table = parquet.read_table(path)
    parquet.write_table(table.drop_columns([column]).append_column(column, pyarrow.nulls(len(table))), path)
    with pytest.raises(ValueError, match=path.name):
        read_tokens(tmp_path, 1, 5, 0)


# -- Texts of tokens -------------------------------------------------------------------------------------

WORDS = ["the", "quick", "a", ".", ",", "é", "naïve"]


def finished(model: Any, before: Any, decoder: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = before, decoder
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    made.add_tokens([AddedToken("<|turn|>", special=True), AddedToken("<call>", special=False)])
    return made


def numbered(*names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def bytewise() -> PreTrainedTokenizerFast:
    """Every byte a token, as the rare characters of most models."""
    model = models.BPE(numbered(*sorted(pre_tokenizers.ByteLevel.alphabet())), [])
    return finished(model, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())


def pieces() -> PreTrainedTokenizerFast:
    """Words with a mark for the space before them, which the first of a text loses; other bytes by number."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(f"▁{word}" for word in WORDS), *WORDS]
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    model = models.BPE(numbered(*names), [], unk_token="<unk>")
    return finished(model, pre_tokenizers.Metaspace(), decoders.Sequence([*parts]))


def word_pieces() -> PreTrainedTokenizerFast:
    """Words parted by spaces, which the decoder leaves out before a full stop or comma."""
    names = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS)]
    model = models.WordPiece(numbered(*names), unk_token="[UNK]")
    return finished(model, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=True))


@pytest.mark.parametrize("make", [bytewise, pieces, word_pieces])
def test_texts_put_together_are_the_completion(make: Any) -> None:
    tokenizer = make()
    texts, chance = TokenTexts(tokenizer), random.Random(0)
    ids = list(range(len(tokenizer)))
    for length in [0, 1, 2, *range(3, 40)]:  # most of these are no valid UTF-8
        completion = chance.choices(ids, k=length)
        found = texts.of(completion)
        assert len(found) == length
        assert "".join(found) == tokenizer.decode(completion, skip_special_tokens=True)


def test_a_character_that_is_split_is_the_text_of_its_last_token_and_a_space_of_the_word_behind_it() -> None:
    tokenizer = bytewise()
    ids = tokenizer("né 🙂!")["input_ids"]
    assert TokenTexts(tokenizer).of(ids) == ["n", "", "é", " ", "", "", "", "🙂", "!"]
    # Special tokens have no text and a name.
    end, turn, call = tokenizer.convert_tokens_to_ids(["<|end|>", "<|turn|>", "<call>"])
    texts = TokenTexts(tokenizer)
    assert texts.of([turn, call, end]) == ["", "<call>", ""]
    assert [texts.special(each) for each in (turn, call, end, 5)] == ["<|turn|>", None, "<|end|>", None]
    tokenizer = pieces()
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁quick", ".", "<|end|>", "▁a"])
    assert TokenTexts(tokenizer).of(ids) == ["the", " quick", ".", "", " a"]
