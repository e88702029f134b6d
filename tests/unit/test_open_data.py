"""Files and hub datasets: names that look like patterns, parts of a split, and what cannot be opened."""

import json

import datasets
import pytest

from grpox.data.open_data import open_data
from grpox.errors import ConfigError


@pytest.fixture
def numbered(tmp_path):
    """``numbered(name, count)``: a .jsonl file with `count` rows."""

    def write(name, count=10):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"prompt": f"{name} {n}"}) + "\n" for n in range(count)))
        return str(path)

    return write


def refused(*arguments, **options):
    with pytest.raises(ConfigError) as caught:
        open_data(*arguments, **options)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl", "[ab]/x**.jsonl"])
def test_a_path_is_a_name_and_no_pattern(numbered, name, streaming):
    for other in ("a1.jsonl", "ab.jsonl", "abc.jsonl", "a/xyz.jsonl"):
        numbered(other)
    rows = list(open_data(numbered(name, 2), streaming=streaming))
    assert [row["prompt"] for row in rows] == [f"{name} 0", f"{name} 1"]


def test_a_part_of_a_file(numbered):
    assert [row["prompt"] for row in open_data(numbered("a.jsonl"), split="train[2:4]")] == [
        "a.jsonl 2",
        "a.jsonl 3",
    ]
    assert len(open_data(numbered("a.jsonl"), split="train[:30%]")) == 3


def test_what_breaks_late_in_a_file_is_told_with_its_reason(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\n1,2\n1,2,3\n")
    problem = refused(str(tmp_path / "a.csv"))
    assert problem.key == "data.path"
    assert "Expected 2 fields in line 3, saw 3" in problem.what


def test_a_cache_that_cannot_be_written_is_named(numbered, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / "file" / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    problem = refused(numbered("fresh.jsonl"))
    assert problem.what.startswith("datasets cannot write its cache: Not a directory")
    assert (problem.given, "HF_DATASETS_CACHE" in problem.allowed) == (f"cache {cache}", True)


def test_a_hub_dataset_is_asked_for_as_the_run_file_says(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **options: asked.append((given, options)))
    open_data("org/name", "main", "test[:5]", streaming=True)
    assert asked == [(("org/name", "main"), {"split": "test[:5]", "streaming": True})]


def test_a_hub_dataset_that_cannot_be_had_is_one_problem(monkeypatch):
    def fails(*given, **options):
        raise ConnectionError("Couldn't reach 'org/name' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    problem = refused("org/name", "main")
    assert (problem.key, problem.given) == ("data.path", "org/name, subset main, split train")
    assert problem.what == (
        "cannot be loaded: ConnectionError: Couldn't reach 'org/name' on the Hub (OfflineModeIsEnabled)"
    )
