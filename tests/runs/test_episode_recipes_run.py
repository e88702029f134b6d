"""The recipes of episodes: their base models are as weak as they say, and steps follow from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from support.fixtures import GrpoxCommand

SHORT = [
    "train.max_steps=2",
    "train.per_device_train_batch_size=32",
    "train.num_generations=8",
    "logging.save_completions_every=1",
    "tracking={}",
    "alarms.steps=2",
]


def run(grpox: GrpoxCommand, folder: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train two short steps; return the summary and the episodes of the first step."""
    output = folder / "runs" / name
    done = grpox("train", name, *SHORT, f"output_dir={output}")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = parquet.read_table(output / "completions" / "step_000001.parquet").to_pylist()
    assert len(rows) == 32
    return json.loads((output / "summary.json").read_text()), rows


def test_the_calculators_base_model_forgets_to_carry_and_may_ask(grpox: GrpoxCommand, folder: Path) -> None:
    summary, rows = run(grpox, folder, "calculator")
    assert 0.25 <= summary["success_before"] <= 0.5
    assert {"success_after", "calls_without_carry_after"} <= summary.keys()
    assert 4 <= sum("[" in row["completion"] for row in rows) <= 20  # a third of 32, give or take 3 deviations
    assert any(row["advantage"] for row in rows)
    assert summary["alarms"] == []


def test_the_guessing_base_model_rarely_finds_the_number(grpox: GrpoxCommand, folder: Path) -> None:
    summary, rows = run(grpox, folder, "guess")
    assert summary["success_before"] <= 0.25
    assert {row["finish_reason"] for row in rows} <= {"turns", "done"}
    assert any(row["advantage"] for row in rows)
    assert summary["alarms"] == []


@pytest.mark.parametrize(("name", "count"), [("calculator", 500), ("guess", 32)])
def test_held_out_prompts(name: str, count: int) -> None:
    import grpox.runfile.recipes

    recipe = Path(grpox.runfile.recipes.__file__).parent / name
    train, heldout = (
        [json.loads(line) for line in (recipe / file).read_text().splitlines()]
        for file in ("train.jsonl", "heldout.jsonl")
    )
    assert len(heldout) == count
    if name == "calculator":
        assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    else:  # the prompt says nothing: each number once
        assert [row["number"] for row in heldout] == list(range(32))
