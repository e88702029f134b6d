"""Files of tokens: what is written is read back, and what was not computed is None, not 0."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from support.watched_runs import record_tokens, token_facts

from grpox.observing.token_files import read_tokens, token_file


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
    assert len(read_tokens(tmp_path, 1, 5, 0)) == 4
    assert len(read_tokens(tmp_path, 1, 5, 0, part=2)) == 1
    assert len(read_tokens(tmp_path, 1, 6, 0)) == 4
    assert len(read_tokens(tmp_path, 3, 5, 0)) == 2
    assert read_tokens(tmp_path, 1, 7, 0) == []
    assert read_tokens(tmp_path, 2, 6, 0) == []


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
