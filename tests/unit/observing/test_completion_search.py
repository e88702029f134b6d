"""The search in completions: what it finds, and an index that follows a run and survives its process."""

from __future__ import annotations

import errno
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from support.patience import patient
from support.watched_runs import write_batch, write_record

from grpox.errors import ConfigError
from grpox.observing.page import scan, search
from grpox.observing.page.index_files import IndexFiles, cache_folder
from grpox.observing.page.search import CompletionIndex
from grpox.observing.page.source import RunSource


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_record(tmp_path / "run")
    write_batch(folder, 1, [("What is 2+2?", "It is FOUR.", 1.0), ("What is 2+2?", "five", 0.0)])
    write_batch(folder, 2, [("Ünïcode?", "100% straße_x", 0.5), ("What is 2+2?", "four'; DROP", 0.25)])
    return folder


@pytest.fixture
def index(folder: Path) -> Iterator[CompletionIndex]:
    index = CompletionIndex(folder, is_live=False)
    index.refresh()
    yield index
    index.close()


def found(index: CompletionIndex, **query: Any) -> list[str]:
    return [row["id"] for row in index.search(**query)["rows"]]


FIRST, SECOND = ["step_000001:0", "step_000001:1"], ["step_000002:0", "step_000002:1"]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", [*FIRST, *SECOND]),
        ("four", [FIRST[0], SECOND[1]]),
        ("FOUR", [FIRST[0], SECOND[1]]),
        ("our", [FIRST[0], SECOND[1]]),
        ("2+2", [*FIRST, SECOND[1]]),  # of the prompt
        ("ünÏCODE", [SECOND[0]]),
        ("%", [SECOND[0]]),
        ("_", [SECOND[0]]),
        ("'; drop", [SECOND[1]]),
        ("four.five", []),  # of two completions
        ('" OR 1', []),
        ("\x00", []),
    ],
)
def test_a_text_is_found_as_it_is(index: CompletionIndex, text: str, rows: list[str]) -> None:
    answer = index.search(text)
    assert [row["id"] for row in answer["rows"]] == rows
    assert answer["total"] == len(rows)


def test_ranges_orders_and_pages(index: CompletionIndex) -> None:
    assert found(index, step_min=2) == SECOND
    assert found(index, step_max=1) == FIRST
    assert found(index, reward_min=0.25, reward_max=0.5) == SECOND
    assert found(index, order="-step") == [*SECOND, *FIRST]
    assert found(index, order="reward") == [FIRST[0], SECOND[0], SECOND[1], FIRST[1]]
    assert found(index, order="-reward", offset=1, limit=2) == [SECOND[1], SECOND[0]]
    assert found(index, offset=10) == []
    with pytest.raises(ConfigError) as caught:
        index.search(order="rewards; --")
    assert caught.value.problems[0].key == "order"


def test_rows_show_what_the_run_saved(index: CompletionIndex) -> None:
    row = index.search("five")["rows"][0]
    assert (row["step"], row["group"], row["sample"], row["prompt"]) == (1, 0, 1, "What is 2+2?")
    assert (row["completion"], row["reward"], row["advantage"]) == ("five", 0.0, -0.5)
    assert (row["rewards"], row["data"], row["tokens"]) == ({"exact": 0.0}, {"answer": "4"}, 2)


def test_a_prompt_is_the_same_over_the_steps(index: CompletionIndex) -> None:
    answer = index.search(group_by_prompt=True)
    assert answer["total"] == 2
    [adding, other] = answer["rows"]
    assert (adding["prompt"], adding["count"]) == ("What is 2+2?", 3)
    assert (adding["first_step"], adding["last_step"]) == (1, 2)
    assert (adding["reward_first"], adding["reward_last"]) == (0.5, 0.25)
    assert found(index, prompt=adding["prompt_id"]) == [*FIRST, SECOND[1]]
    assert found(index, prompt=other["prompt_id"], text="straße") == [SECOND[0]]
    assert index.search(prompt=adding["prompt_id"], limit=1)["history"] == [[1, 1, 2], [1.0, 0.0, 0.25]]
    assert found(index, prompt="no id") == found(index, prompt="ab") == []


def test_a_completion_without_a_reward_is_in_no_range_and_last(folder: Path, index: CompletionIndex) -> None:
    write_batch(folder, 3, [("What is 2+2?", "no idea", math.nan)])
    index.refresh()
    assert found(index, order="reward")[-1] == found(index, order="-reward")[-1] == "step_000003:0"
    assert "step_000003:0" not in found(index, reward_min=-9.0)
    assert index.search("idea")["rows"][0]["reward"] is None
    [row, *_] = index.search("idea", group_by_prompt=True)["rows"]
    assert row["reward_first"] is None


def test_the_index_follows_a_run(folder: Path, index: CompletionIndex) -> None:
    write_batch(folder, 3, [("What is 2+2?", "seven", 0.0)])
    write_batch(folder, 3, [("What is 2+2?", "seven!", 0.0)], "_2")
    assert found(index, text="seven") == []
    index.refresh()
    assert found(index, text="seven") == ["step_000003:0", "step_000003_2:0"]


def test_a_resumed_run_that_goes_back_takes_its_completions_along(folder: Path, index: CompletionIndex) -> None:
    (folder / "completions" / "step_000001.parquet").unlink()
    write_batch(folder, 2, [("What is 2+2?", "another", 0.0)])
    index.refresh()
    answer = index.search()
    assert [row["completion"] for row in answer["rows"]] == ["another"]
    assert answer["count"] == 1


def test_the_index_is_kept(folder: Path, index: CompletionIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, before = index.index_s, index.search()
    index.close()
    monkeypatch.setattr(search, "_batches", lambda path: pytest.fail("read again"))
    again = CompletionIndex(folder, is_live=False)
    again.refresh()
    assert again.search() == before
    assert again.index_s == seconds
    again.close()


def test_another_run_in_the_folder_is_not_the_old_one(folder: Path, index: CompletionIndex) -> None:
    index.close()
    shutil.rmtree(folder / "completions")
    write_batch(folder, 1, [("new?", "new", 1.0)])
    again = CompletionIndex(folder, is_live=False)
    again.refresh()
    assert [row["completion"] for row in again.search()["rows"]] == ["new"]
    again.close()


def test_what_a_killed_process_left_half_written_is_cut_off(folder: Path, index: CompletionIndex) -> None:
    before = index.search()
    index.close()
    [home] = cache_folder().iterdir()
    for name in ("text", "end", "journal"):
        with (home / name).open("ab") as file:
            file.write(b'{"half')
    again = CompletionIndex(folder, is_live=False)
    again.refresh()
    assert again.search() == before
    again.close()


def test_a_second_process_searches_too(folder: Path, index: CompletionIndex) -> None:
    second = CompletionIndex(folder, is_live=False)
    second.refresh()
    assert second.search() == {**index.search(), "index_s": second.index_s}
    second.close()
    assert found(index) == [*FIRST, *SECOND]


def test_without_a_cache_folder_the_index_is_a_temporary_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    index = CompletionIndex(folder, is_live=False)
    index.refresh()
    assert found(index, text="four") == [FIRST[0], SECOND[1]]
    write_batch(folder, 3, [("What is 2+2?", "forty", 0.0)])
    index.refresh()
    assert found(index, text="forty") == ["step_000003:0"]
    index.close()


def test_a_full_disk_is_named_and_what_is_indexed_stays(
    folder: Path, index: CompletionIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_batch(folder, 3, [("new prompt", "later", 0.0)])

    def full(files: IndexFiles, entry: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(IndexFiles, "commit", full)
        with pytest.raises(OSError, match="No space"):
            index.refresh()
    assert found(index) == [*FIRST, *SECOND]
    index.refresh()
    assert found(index, text="later") == found(index, text="new prompt") == ["step_000003:0"]


def test_the_thread_tells_a_full_disk_as_a_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(files: IndexFiles, entry: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexFiles, "commit", full)
    index = CompletionIndex(folder)
    try:
        wait_until(lambda: bool(index.problem))
        answer = index.search()
        assert "No space left on device" in answer["message"]
        assert not answer["is_indexed"]
    finally:
        index.close()


def test_a_damaged_file_is_named_and_the_others_are_searched(folder: Path) -> None:
    (folder / "completions" / "step_000003.parquet").write_bytes(b"PAR1 rubbish PAR1")
    index = CompletionIndex(folder, is_live=False)
    index.refresh()
    assert "step_000003.parquet" in index.problem
    assert index.is_complete
    assert found(index, text="four") == [FIRST[0], SECOND[1]]
    index.close()


@pytest.mark.parametrize(("column", "values"), [("prompt", [None]), ("reward", ["high"]), ("group", None)])
def test_a_file_with_other_content_is_named_and_the_others_are_searched(
    folder: Path, index: CompletionIndex, column: str, values: list[Any] | None
) -> None:
    other = folder / "completions" / "step_000003.parquet"
    table = parquet.read_table(folder / "completions" / "step_000001.parquet").slice(0, 1)
    table = table.drop_columns([column])
    parquet.write_table(table if values is None else table.append_column(column, [values]), other)
    index.refresh()
    assert index.problem == "1 file of completions cannot be read, such as step_000003.parquet"
    assert index.is_complete
    assert found(index, text="four") == [FIRST[0], SECOND[1]]


def test_the_index_is_built_beside_its_use(folder: Path) -> None:
    index = CompletionIndex(folder)
    try:
        assert index.search()["is_indexed"] is False  # an answer before the index begins
        wait_until(lambda: index.is_complete)
        assert index.search()["total"] == 4
    finally:
        index.close()


def test_an_index_of_a_folder_that_is_gone_is_removed(
    folder: Path, index: CompletionIndex, tmp_path: Path
) -> None:
    index.close()
    shutil.rmtree(folder)
    other = write_record(tmp_path / "other")
    write_batch(other, 1, [("a", "b", 1.0)])
    later = CompletionIndex(other, is_live=False)
    later.refresh()
    later.close()
    assert len(list(cache_folder().iterdir())) == 1


def test_a_search_imports_neither_torch_nor_pandas(folder: Path) -> None:
    """They would take half of the server's memory."""
    code = (
        "import sys, pathlib\n"
        "from grpox.observing.page.source import RunSource\n"
        "from grpox.observing.page.search import CompletionIndex\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "index = CompletionIndex(folder, is_live=False)\n"
        "index.refresh()\n"
        "source = RunSource(folder, index=index)\n"
        "source.run(), source.metrics(), source.completions(text='four', group_by_prompt=True)\n"
        "assert source.completions(text='e')['rows']\n"
        "print({'torch', 'pandas', 'transformers', 'mlflow'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("sample", [0, 1, 256])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_both_ways_of_scanning_find_the_same(chunk: int, sample: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size, texts in question with wide gaps, and searches one by one or text after text."""
    monkeypatch.setattr(scan, "CHUNK", chunk)
    monkeypatch.setattr(scan, "GAP", 3)
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("ab"), random.integers(0, 6))) for _ in range(300)]
    data, ends = "".join(texts).encode(), np.cumsum([len(text) for text in texts])
    among = random.random(300) < 0.3
    monkeypatch.setattr(scan, "SAMPLE", sample)
    monkeypatch.setattr(scan, "DENSE", 0)  # after the first place, if SAMPLE is 1
    for needle in ("a", "ab", "aba", "bbb"):
        expected = [is_asked and needle in text for text, is_asked in zip(texts, among, strict=True)]
        got = scan.scan(lambda start, stop: data[start:stop], ends, among, needle.encode())
        assert got.tolist() == expected


def wait_until(is_true: Any) -> None:
    deadline = time.monotonic() + patient(20)
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_tokens_are_found_in_the_file_of_a_step_or_a_later_one(folder: Path, index: CompletionIndex) -> None:
    """The second completion of step 1 was first trained on in step 2."""
    write_tokens(folder, 1, {"group": 0, "sample": 0}, logprob=[-0.5, None, math.nan])
    assert [row["has_tokens"] for row in index.search()["rows"]] == [True, False, False, False]
    write_tokens(folder, 2, {"group": 0, "sample": 1}, logprob=[-0.25, None, -0.125])
    assert [row["has_tokens"] for row in index.search()["rows"]] == [True, True, False, False]
    source = RunSource(folder, index=index)
    tokens = source.tokens(id=FIRST[0])["tokens"]
    assert [token["logprob"] for token in tokens] == [-0.5, None, None]
    assert [token["kind"] for token in tokens] == ["model", "observation", "model"]
    assert [token["text"] for token in source.tokens(id=FIRST[1])["tokens"]] == ["a", "b", "c"]
    assert source.tokens(id=SECOND[0]) == {"tokens": []}
    (folder / "tokens" / "step_000002.parquet").write_bytes(b"PAR1 rubbish PAR1")
    assert [row["has_tokens"] for row in index.search()["rows"]] == [True, False, False, False]


def write_tokens(folder: Path, step: int, of: dict[str, int], logprob: list[float | None]) -> None:
    """Write a file with the tokens of one completion of step 1."""
    path = folder / "tokens" / f"step_{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    key = {name: [value] for name, value in {"step": 1, "part": 1, **of}.items()}
    lists = {"text": [["a", "b", "c"]], "logprob": [logprob], "mask": [[1, 0, 1]], "turn": [[0, None, 1]]}
    parquet.write_table(pyarrow.table(key | lists), path)
