"""Files and hub datasets: names that look like patterns, parts of a split, and what cannot be opened."""

import json

import datasets
import pytest
from support.problems import problem_of

from grpox.data import json_rows
from grpox.data.json_rows import UnreadableData
from grpox.data.open_data import open_data


@pytest.fixture
def numbered(tmp_path):
    """``numbered(name, count)``: a .jsonl file with `count` rows."""

    def write(name, count=10):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"prompt": f"{name} {n}"}) + "\n" for n in range(count)))
        return str(path)

    return write


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl", "[ab]/x**.jsonl"])
def test_a_path_is_a_name_and_no_pattern(numbered, name, streaming):
    for other in ("a1.jsonl", "ab.jsonl", "abc.jsonl", "a/xyz.jsonl"):
        numbered(other)
    rows = list(open_data(numbered(name, 2), streaming=streaming))
    assert [row["prompt"] for row in rows] == [f"{name} 0", f"{name} 1"]


def test_a_part_of_a_file(numbered):
    rows = open_data(numbered("a.jsonl"), split="train[2:4]")
    assert [row["prompt"] for row in rows] == ["a.jsonl 2", "a.jsonl 3"]
    assert len(open_data(numbered("a.jsonl"), split="train[:30%]")) == 3


def test_what_breaks_late_in_a_file_is_told_with_its_reason(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\n1,2\n1,2,3\n")
    problem = problem_of(open_data, str(tmp_path / "a.csv"))
    assert problem.key == "data.path"
    assert "Expected 2 fields in line 3, saw 3" in problem.what


def test_a_cache_that_cannot_be_written_is_named(numbered, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / "file" / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    problem = problem_of(open_data, numbered("fresh.jsonl"))
    assert problem.what.startswith("datasets cannot write its cache: Not a directory")
    assert (problem.given, "HF_DATASETS_CACHE" in problem.allowed) == (f"cache {cache}", True)


def test_a_hub_dataset_is_asked_for_as_the_run_file_says_and_a_failure_is_one_problem(monkeypatch):
    asked = []

    def load(*given, **options):
        asked.append((given, options))
        raise ConnectionError("Couldn't reach 'org/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    problem = problem_of(open_data, "org/name", "main", "test[:5]", streaming=True)
    assert asked == [(("org/name", "main"), {"split": "test[:5]", "streaming": True})]
    assert (problem.key, problem.given) == ("data.path", "org/name, subset main, split test[:5]")
    assert problem.what.endswith(": ConnectionError: Couldn't reach 'org/name' on the Hub")


SUBSETS = """---
configs:
- config_name: easy
  data_files: [{split: train, path: easy.jsonl}, {split: test, path: easy.jsonl}]
- config_name: hard
  data_files: [{split: train, path: hard.jsonl}]
---
"""


@pytest.mark.parametrize("streaming", [False, True])
def test_a_subset_or_split_that_a_hub_dataset_lacks_is_named(tmp_path, numbered, monkeypatch, streaming):
    """A relative folder is to datasets as a dataset of the hub."""
    for name in ("easy", "hard"):
        numbered(f"folder/{name}.jsonl", 3)
    (tmp_path / "folder" / "README.md").write_text(SUBSETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = open_data("folder", "hard", "train", streaming)
    assert [row["prompt"] for row in rows] == [f"folder/hard.jsonl {n}" for n in range(3)]
    key = "evaluation.sets.held_out.path"
    for subset, split, named, given, allowed, near in (
        (None, "train", "subset", "", "easy, hard", ""),
        ("esy", "train", "subset", "esy", "easy, hard", "easy"),
        ("easy", "tst", "split", "tst", "train, test", "test"),
        ("hard", "test", "split", "test", "train", ""),
    ):
        problem = problem_of(open_data, "folder", subset, split, streaming, key)
        assert problem.key == f"evaluation.sets.held_out.{named}"
        assert (problem.given, problem.allowed, problem.nearest) == (given, allowed, near)
    problem = problem_of(open_data, "folder", "easy", "train[:x]")
    assert (problem.key, problem.given) == ("data.path", "folder, subset easy, split train[:x]")


def written(tmp_path, name, *lines):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


TEXTS = ["007", "1e3", "null", "2026-11-23", "\ud800", ""]
NUMBERS = [10**30, -(2**64), 2**63, 1.0, 0.1 + 0.2, True]
NESTED = [[], {}, [1, "1", None, [2.5]], {"b": {"c": "07"}, "a": None}]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("value", [*TEXTS, *NUMBERS, *NESTED], ids=repr)
def test_a_value_comes_in_as_json_says(tmp_path, value, streaming):
    rows = [{"prompt": "a", "x": value}, {"prompt": "b"}, {"prompt": "c", "x": None}]
    path = written(tmp_path, "a.jsonl", *map(json.dumps, rows))
    read = list(open_data(path, streaming=streaming))
    assert [list(row) for row in read] == [["prompt", "x"]] * 3
    assert [repr(row["x"]) for row in read] == [repr(value), "None", "None"]


@pytest.mark.parametrize("streaming", [False, True])
def test_no_object_gets_the_keys_of_another_and_numbers_stay_what_they_are(tmp_path, streaming):
    rows = [{"x": {"a": 1}, "y": [{"role": "user"}]}, {"x": {"b": "2"}, "y": [{"name": "z"}, {}]}]
    path = written(tmp_path, "a.json", json.dumps(rows, indent=1))
    assert list(open_data(path, streaming=streaming)) == rows
    path = written(tmp_path, "b.jsonl", '{"x": 1}', '{"x": 2.5}', f'{{"x": {2**53 + 1}}}')
    assert [repr(row["x"]) for row in open_data(path, streaming=streaming)] == ["1", "2.5", str(2**53 + 1)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("007", 7, 'a string in line 2: "007", and a number in line 4: 7'),
        (1, True, "a number in line 2: 1, and a boolean in line 4: true"),
        ([1], {"a": 1}, 'an array in line 2: [1], and an object in line 4: {"a": 1}'),
        ("x" * 99, 0.5, f'a string in line 2: "{"x" * 36}..., and a number in line 4: 0.5'),
    ],
)
def test_a_column_with_several_types_is_refused(tmp_path, first, second, told, streaming):
    rows = [{"p": "a"}, {"p": "b", "x": first}, {"p": "c", "x": None}, {"p": "d", "x": second}]
    path = written(tmp_path, "a.jsonl", *map(json.dumps, rows))
    problem = problem_of(open_data, path, streaming=streaming, key="evaluation.path")
    assert (problem.key, problem.given) == ("evaluation.path", path)
    assert problem.what == f"column x has several types: {told}"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", '{"p": 1}\n{"p": 1, "p": 1}', 'line 2 has the key "p" twice'),
        ("a.json", '[{"p": {"q": 1, "q": 2}}]', 'a record has the key "q" twice'),
        ("a.jsonl", "{}\n\n{}", "has no record with a column"),
        ("a.jsonl", '{"p": 1}\n[1]', "line 2 is not an object with columns as keys"),
    ],
)
def test_what_json_leaves_open_is_refused(tmp_path, name, text, told):
    assert problem_of(open_data, written(tmp_path, name, text)).what == told


def test_a_changed_file_is_read_anew(tmp_path):
    path = written(tmp_path, "a.jsonl", '{"p": "old"}')
    assert open_data(path)[0] == {"p": "old"}
    written(tmp_path, "a.jsonl", '{"p": "new"}')
    assert open_data(path)[0] == {"p": "new"}


def test_a_stream_has_the_columns_of_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "LOOKED_AT", 20)
    path = written(tmp_path, "a.jsonl", '{"p": "a"}', '{"p": "b", "q": 1}', '{"p": "c", "q": 2, "r": 3}')
    rows = iter(open_data(path, streaming=True))
    assert [next(rows), next(rows)] == [{"p": "a", "q": None}, {"p": "b", "q": 1}]
    with pytest.raises(UnreadableData, match="line 3 has a column that the stream's first 32 MiB lack: r"):
        next(rows)
