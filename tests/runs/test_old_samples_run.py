"""Samples of a run that samples ahead carry the values of their own rows into every pass over them."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from pyarrow import parquet
from support.killing import assert_same, finish, kill_and_resume
from support.run_files import SHORT

GROUP, SIZE, PASSES, STEPS = 8, 32, 2, 16
EACH = 2 * PASSES
"""Optimizer steps on a generation batch: two, in each pass."""
SETTINGS = (
    "generator={path: 'old_samples.py:MarksAhead'}",
    "rewards=[{path: 'old_samples.py:number_of'}, {path: 'old_samples.py:length_of', weight: 0.5}]",
    "advantage={path: 'old_samples.py:ByAnswer'}",
    *("correction=token-truncate", "train.max_staleness=1", "train.num_generations=8"),
    *("train.steps_per_generation=2", "train.gradient_accumulation_steps=1", f"train.num_iterations={PASSES}"),
    *(f"train.max_steps={STEPS}", "train.learning_rate=2.0e-3", "train.warmup_steps=0"),
    *("checkpoint.every=1", "logging.save_completions_every=1", *SHORT),
)


def overrides(name: str, ranks: int) -> list[str]:
    loss = f"loss={{path: 'old_samples.py:WritesInputs', file: {name}.jsonl}}"
    size = f"train.per_device_train_batch_size={SIZE // 2 // ranks}"
    return [*SETTINGS, loss, size, f"output_dir=runs/{name}"]


def records_of(run: Path) -> dict[int, dict[str, Any]]:
    """Return the record of each completion by its number: that of its generation batch, then of its row."""
    records = {}
    for generation, file in enumerate(sorted((run / "completions").glob("*.parquet"))):
        for row in parquet.read_table(file).to_pylist():
            records[generation * SIZE + row["group"] * GROUP + row["sample"]] = row
    return records


def assert_own_values(folder: Path, ranks: int) -> None:
    """Compare what the loss was given of each row with the record of the row's completion."""
    records = records_of(folder / "runs" / "whole")
    assert len(records) == SIZE * STEPS // EACH
    lines = [
        json.loads(line)
        for rank in range(ranks)
        for line in (folder / f"whole.jsonl.{rank}").read_text().splitlines()
    ]
    assert len(lines) == len(records) * PASSES
    first_pass: dict[int, list[list[float]]] = {}
    of_group: dict[int, list[float]] = defaultdict(list)
    for number, record in records.items():
        of_group[number // GROUP].append(record["reward"])
    for line in sorted(lines, key=lambda line: line["step"]):
        number = line["sequence_ids"]
        generation, record = number // SIZE, records[number]
        marks = json.loads(record["rollout_extra"])
        assert (marks["group_id"], marks["sample"]) == (record["group"], record["sample"])
        assert marks["policy_version"] == record["policy_version"] == EACH * max(0, generation - 1)
        assert generation == (line["step"] - 1) // EACH
        assert line["group_ids"] == number // GROUP
        assert line["sampler_logprobs"] == pytest.approx(marks["sampler_logprobs"], abs=1e-6)
        text = record["completion"]
        wanted = [
            sum(place * ord(letter) for place, letter in enumerate(text, 1)) / 1024,
            len(text) or math.nan,
        ]
        assert line["rewards"] == pytest.approx(wanted, nan_ok=True)
        assert record["prompt"].endswith("=")
        assert int(line["answer"]) == sum(map(int, record["prompt"].strip("=").split("+")))
        advantage = (record["reward"] - mean(of_group[number // GROUP])) * (1 + int(line["answer"]) % 3)
        assert record["advantage"] == pytest.approx(advantage, abs=1e-5)
        assert line["advantages"] == pytest.approx([advantage] * len(line["logprobs"]), abs=1e-5)
        # pi_old and the reference are fixed before the first step on the batch; the next pass has the same.
        fixed = [line["old_logprobs"], line["reference_logprobs"]]
        assert fixed == first_pass.setdefault(number, fixed)
        if (line["step"] - 1) % EACH == 0:
            assert line["logprobs"] == pytest.approx(line["old_logprobs"], abs=1e-5)
        if line["step"] == 1:
            assert line["logprobs"] == pytest.approx(line["reference_logprobs"], abs=1e-5)
    # The values do tell old samples from new ones, the policy from its reference, and one row from another.
    late = [line for line in lines if line["step"] > EACH]
    for one, other in (("old", "sampler"), ("old", "reference")):
        names = [f"{one}_logprobs", f"{other}_logprobs"]
        pairs = [pair for line in late for pair in zip(*(line[name] for name in names), strict=True)]
        assert any(abs(a - b) > 1e-3 for a, b in pairs), names
    assert len({str(each["rollout_extra"]) for each in records.values()}) == len(records)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).with_name("old_samples.py"), tmp_path)
    return tmp_path


def test_samples_of_two_ranks_carry_their_own_values(folder: Path) -> None:
    finish(folder, "quickstart", *overrides("whole", 2), ranks=2)
    assert_own_values(folder, 2)


def test_a_killed_run_goes_on_with_the_samples_that_were_begun(folder: Path) -> None:
    finish(folder, "quickstart", *overrides("whole", 1))
    assert_own_values(folder, 1)
    # Two of the four steps on the second batch.
    killed = kill_and_resume(folder, "quickstart", *overrides("killed", 1), steps=6)
    assert_same(folder / "runs" / "whole", killed)
    whole, killed = (records_of(folder / "runs" / name) for name in ("whole", "killed"))
    assert {number: each["rollout_extra"] for number, each in whole.items()} == {
        number: each["rollout_extra"] for number, each in killed.items()
    }
