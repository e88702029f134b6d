"""Files of tokens: what is written is read back, and what was not computed is None, not 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from grpox.observing.token_files import read_tokens, token_file, write_tokens
from grpox.policy.batch import TokenRecord
from grpox.update.token_facts import TokenFacts


class Texts:
    """Each token is its number, and 0 a special one."""

    def of(self, ids: list[int]) -> list[str]:
        return ["" if each == 0 else f"{each}," for each in ids]

    def special(self, token: int) -> str | None:
        return None if token else "<end>"


def facts(
    step: int = 1, part: int = 1, group: int = 0, sample: int = 0, ids: tuple[int, ...] = (7, 8, 9, 0)
) -> TokenFacts:
    """The second token an observation, the last one without a log-probability of the generator."""
    count = len(ids)
    numbers = np.arange(count, dtype=np.float32)
    written = np.arange(count) != 1
    sampler = -numbers
    sampler[-1:] = np.nan
    return TokenFacts(
        TokenRecord(step, part, group, sample, np.where(written, np.arange(count) // 2, -1).astype(np.int32)),
        ids=np.array(ids, np.int32),
        is_scored=written,
        is_counted=written & (np.arange(count) != 2),
        sampler_logprob=sampler,
        advantage=numbers + 0.5,
        logprob=-numbers - 0.25,
        ratio=numbers + 1,
        entropy=numbers / 4,
        correction=np.ones(count, np.float32),
    )


def write(folder: Path, step: int, *completions: TokenFacts) -> None:
    texts: Any = Texts()
    write_tokens(token_file(folder, step), completions, texts)


def test_a_token_is_read_back_with_all_its_facts(tmp_path: Path) -> None:
    write(tmp_path, 1, facts(sample=1), facts(sample=0, ids=(3,)))
    first, observation, third, last = read_tokens(tmp_path, 1, 0, 1)
    assert first == {
        "id": 7, "text": "7,", "special": None, "logprob": 0.0, "policy_logprob": -0.25, "ratio": 1.0,
        "advantage": 0.5, "entropy": 0.0, "correction": 1.0, "mask": 1, "turn": 0, "kind": "model",
    }  # fmt: skip
    assert observation == {
        "id": 8, "text": "8,", "special": None, "logprob": None, "policy_logprob": None, "ratio": None,
        "advantage": None, "entropy": None, "correction": None, "mask": 0, "turn": None, "kind": "observation",
    }  # fmt: skip
    assert (third["mask"], third["ratio"], third["turn"]) == (0, 3.0, 1)
    assert (last["special"], last["text"], last["logprob"]) == ("<end>", "", None)
    assert [each["id"] for each in read_tokens(tmp_path, 1, 0, 0)] == [3]


def test_numbers_that_json_lacks_are_none(tmp_path: Path) -> None:
    odd = facts()
    odd.logprob[:] = [-np.inf, 0, np.nan, np.inf]
    write(tmp_path, 1, odd)
    tokens = read_tokens(tmp_path, 1, 0, 0)
    assert [each["policy_logprob"] for each in tokens] == [None] * 4
    json.dumps(tokens, allow_nan=False)


def test_a_completion_is_found_by_the_name_of_its_file_whichever_step_trained_on_it(tmp_path: Path) -> None:
    write(tmp_path, 1, facts(1, 1, 5), facts(1, 2, 5, ids=(4,)))
    write(tmp_path, 2, facts(1, 1, 6))  # the second step of the same generation batch
    write(tmp_path, 3, facts(3, 1, 5, ids=(1, 2)))
    assert len(read_tokens(tmp_path, 1, 5, 0)) == 4
    assert len(read_tokens(tmp_path, 1, 5, 0, part=2)) == 1
    assert len(read_tokens(tmp_path, 1, 6, 0)) == 4
    assert len(read_tokens(tmp_path, 3, 5, 0)) == 2
    assert read_tokens(tmp_path, 1, 7, 0) == []
    assert read_tokens(tmp_path, 2, 6, 0) == []


def test_a_search_ends_at_the_next_generation_batch(tmp_path: Path) -> None:
    write(tmp_path, 3, facts(3))
    token_file(tmp_path, 4).write_text("no parquet")
    assert read_tokens(tmp_path, 1, 0, 0) == []
    with pytest.raises(pyarrow.ArrowInvalid):
        read_tokens(tmp_path, 4, 0, 0)


@pytest.mark.parametrize("column", ["special", "id", "mask"])
def test_an_error_of_tokens_names_their_file(tmp_path: Path, column: str) -> None:
    write(tmp_path, 1, facts(1, 1, 5))
    path = token_file(tmp_path, 1)
    table = parquet.read_table(path)
    parquet.write_table(table.drop_columns([column]).append_column(column, pyarrow.nulls(len(table))), path)
    with pytest.raises(ValueError, match=path.name):
        read_tokens(tmp_path, 1, 5, 0)


def test_a_run_without_tokens_has_none(tmp_path: Path) -> None:
    assert read_tokens(tmp_path, 1, 0, 0) == []
