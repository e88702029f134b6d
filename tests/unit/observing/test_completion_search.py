"""The search in completions: what it finds, and how it follows a run."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from support.patience import patient
from support.watched_runs import record_tokens, token_facts, write_batch, write_record

from grpox.errors import ConfigError
from grpox.observing.page import rows
from grpox.observing.page import search as module
from grpox.observing.page.search import CompletionSearch
from grpox.observing.page.source import RunSource


@pytest.fixture(autouse=True)
def _whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", patient(60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_record(tmp_path / "run")
    write_batch(folder, 1, [("What is 2+2?", "It is FOUR.", 1.0), ("What is 2+2?", "five", 0.0)])
    write_batch(folder, 2, [("Ünïcode?", "100% straße_x", 0.5), ("What is 2+2?", "four'; DROP", 0.25)])
    return folder


@pytest.fixture
def search(folder: Path) -> Iterator[CompletionSearch]:
    search = CompletionSearch(folder)
    yield search
    search.close()


def found(search: CompletionSearch, **query: Any) -> list[str]:
    return [row["id"] for row in search.search(**query)["rows"]]


FIRST, SECOND = ["step_000001:0", "step_000001:1"], ["step_000002:0", "step_000002:1"]


def test_a_text_is_found_as_it_is(search: CompletionSearch) -> None:
    for text, ids in {
        "": [*FIRST, *SECOND],
        "FOUR": [FIRST[0], SECOND[1]],
        "our": [FIRST[0], SECOND[1]],
        "2+2": [*FIRST, SECOND[1]],  # of the prompt
        "ünÏCODE": [SECOND[0]],
        "%": [SECOND[0]],
        "_": [SECOND[0]],
        "'; drop": [SECOND[1]],
        "four.five": [],  # of two completions
        '" OR 1': [],
        "\x00": [],
    }.items():
        answer = search.search(text)
        assert ([row["id"] for row in answer["rows"]], answer["total"]) == (ids, len(ids))


def test_ranges_orders_and_pages_and_rows_as_the_run_saved_them(search: CompletionSearch) -> None:
    assert found(search, step_min=2) == SECOND
    assert found(search, step_max=1) == FIRST
    assert found(search, reward_min=0.25, reward_max=0.5) == SECOND
    assert found(search, order="-step") == [*SECOND, *FIRST]
    assert found(search, order="reward") == [FIRST[0], SECOND[0], SECOND[1], FIRST[1]]
    assert found(search, order="-reward", offset=1, limit=2) == [SECOND[1], SECOND[0]]
    assert found(search, offset=10) == []
    with pytest.raises(ConfigError) as caught:
        search.search(order="rewards; --")
    assert caught.value.problems[0].key == "order"
    assert search.search("five")["rows"][0].items() >= {
        "step": 1, "group": 0, "sample": 1, "prompt": "What is 2+2?", "completion": "five", "reward": 0.0,
        "advantage": -0.5, "rewards": {"exact": 0.0}, "data": {"answer": "4"}, "tokens": 2,
    }.items()  # fmt: skip


def test_a_prompt_is_the_same_over_the_steps(folder: Path, search: CompletionSearch) -> None:
    answer = search.search(group_by_prompt=True)
    assert answer["total"] == 2
    [adding, other] = answer["rows"]
    facts = ("prompt", "count", "first_step", "last_step", "reward_first", "reward_last")
    assert [adding[fact] for fact in facts] == ["What is 2+2?", 3, 1, 2, 0.5, 0.25]
    assert found(search, prompt=adding["prompt_id"]) == [*FIRST, SECOND[1]]
    assert found(search, prompt=other["prompt_id"], text="straße") == [SECOND[0]]
    assert search.search(prompt=adding["prompt_id"], limit=1)["history"] == [[1, 1, 2], [1.0, 0.0, 0.25]]
    assert found(search, prompt="no id") == found(search, prompt="ab") == []
    # A completion without a reward is in no range, and last.
    write_batch(folder, 3, [("What is 2+2?", "no idea", math.nan)])
    assert found(search, order="reward")[-1] == found(search, order="-reward")[-1] == "step_000003:0"
    assert "step_000003:0" not in found(search, reward_min=-9.0)
    assert search.search("idea")["rows"][0]["reward"] is None
    [row, *_] = search.search("idea", group_by_prompt=True)["rows"]
    assert row["reward_first"] is None


def test_a_search_follows_a_run_that_goes_on_and_back(folder: Path, search: CompletionSearch) -> None:
    assert found(search, text="seven") == []
    write_batch(folder, 3, [("What is 2+2?", "seven", 0.0)])
    write_batch(folder, 3, [("What is 2+2?", "seven!", 0.0)], "_2")
    assert found(search, text="seven") == ["step_000003:0", "step_000003_2:0"]
    for stem in ("step_000001", "step_000003", "step_000003_2"):
        (folder / "completions" / f"{stem}.parquet").unlink()
    write_batch(folder, 2, [("What is 2+2?", "another seven", 0.0)])
    assert found(search, text="seven") == found(search) == ["step_000002:0"]
    for step in range(4, 30):  # in any place among the others: a file that goes while they are listed
        (folder / "completions" / f"step_{step:06d}.parquet").symlink_to("gone")
    assert found(search, text="seven") == ["step_000002:0"]
    shutil.rmtree(folder / "completions")
    assert found(search) == []


def test_answers_of_half_a_run(folder: Path, search: CompletionSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    read, goes_on = module._read_hits, threading.Event()

    def read_slowly(path: Path, text: str) -> Any:
        if text == "" or path.stem != {"four": FIRST, "DROP": SECOND}[text][0].partition(":")[0]:
            assert goes_on.wait(patient(60))
        return read(path, text)

    monkeypatch.setattr(module, "_read_hits", read_slowly)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.0)
    deadline = time.monotonic() + patient(60)
    for text, order, first in (("four", "step", FIRST[0]), ("DROP", "-step", SECOND[1])):
        while not (answer := search.search(text, order=order))["rows"]:
            assert time.monotonic() < deadline
        assert ([row["id"] for row in answer["rows"]], answer["is_indexed"]) == ([first], False)
    assert search.search()["is_indexed"] is False
    goes_on.set()
    monkeypatch.setattr(module, "WAIT_SECONDS", patient(60))
    answer = search.search("four")
    assert ([row["id"] for row in answer["rows"]], answer["is_indexed"]) == ([FIRST[0], SECOND[1]], True)


def test_the_oldest_search_ends(search: CompletionSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, read = threading.Event(), []

    def wait(path: Path, text: str) -> Any:
        read.append(text)
        assert goes_on.wait(patient(60))
        return np.empty(0, module._HIT)

    monkeypatch.setattr(module, "_read_hits", wait)
    with ThreadPoolExecutor(1) as asks:
        monkeypatch.setattr(module, "WAIT_SECONDS", patient(60))
        first = asks.submit(search.search, "a")
        while not read:
            time.sleep(0.01)
        monkeypatch.setattr(module, "WAIT_SECONDS", 0.0)
        for text in ("b", "c", "d"):
            search.search(text)
        goes_on.set()
        assert first.result()["is_indexed"] is False
    monkeypatch.setattr(module, "WAIT_SECONDS", patient(60))
    search.search("d")
    search.close()
    assert read.count("a") == 1  # of two files
    assert read.count("d") == 2


def test_a_file_may_disappear(folder: Path, search: CompletionSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    read = rows.read_parquet

    def go(path: Path, *arguments: Any, **others: Any) -> Any:
        if path.stem == "step_000001":
            path.unlink(missing_ok=True)
        return read(path, *arguments, **others)

    monkeypatch.setattr(rows, "read_parquet", go)
    assert found(search) == SECOND


@pytest.mark.parametrize(
    ("column", "values"), [("", None), ("prompt", [None]), ("reward", ["high"]), ("group", None)]
)
def test_a_file_with_other_content_is_named_and_the_others_are_searched(
    folder: Path, search: CompletionSearch, column: str, values: list[Any] | None
) -> None:
    other = folder / "completions" / "step_000003.parquet"
    table = parquet.read_table(folder / "completions" / "step_000001.parquet").slice(0, 1)
    if column:
        table = table.drop_columns([column])
        parquet.write_table(table if values is None else table.append_column(column, [values]), other)
    else:
        other.write_bytes(b"PAR1 rubbish PAR1")
    answer = search.search("four")
    assert [row["id"] for row in answer["rows"]] == [FIRST[0], SECOND[1]]
    assert answer["message"] == "1 file of completions cannot be read, such as step_000003.parquet"
    assert answer["is_indexed"]


def test_a_search_imports_neither_torch_nor_pandas(folder: Path) -> None:
    """They would take half of the server's memory."""
    code = (
        "import sys, pathlib\n"
        "from grpox.observing.page.source import RunSource\n"
        "source = RunSource(pathlib.Path(sys.argv[1]))\n"
        "source.run(), source.metrics(), source.completions(text='four', group_by_prompt=True)\n"
        "source.close()\n"
        "print({'torch', 'pandas', 'transformers', 'mlflow'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr


def test_tokens_are_found_in_the_file_of_a_step_or_a_later_one(folder: Path, search: CompletionSearch) -> None:
    """The second completion of step 1 was first trained on in step 2."""
    record_tokens(folder, 1, token_facts(ids=(7, 8, 9)))
    assert [row["has_tokens"] for row in search.search()["rows"]] == [True, False, False, False]
    record_tokens(folder, 2, token_facts(sample=1, ids=(1, 2, 3)))
    assert [row["has_tokens"] for row in search.search()["rows"]] == [True, True, False, False]
    source = RunSource(folder)
    tokens = source.tokens(id=FIRST[0])["tokens"]
    assert [token["logprob"] for token in tokens] == [0, None, -2]
    assert [token["kind"] for token in tokens] == ["model", "observation", "model"]
    assert [token["text"] for token in source.tokens(id=FIRST[1])["tokens"]] == ["<1>", "<2>", "<3>"]
    assert source.tokens(id=SECOND[0]) == {"tokens": []}
    (folder / "tokens" / "step_000002.parquet").write_bytes(b"PAR1 rubbish PAR1")
    assert [row["has_tokens"] for row in search.search()["rows"]] == [True, False, False, False]
