"""Recorded batches: the same code gives the same numbers again, and one other number is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from recorded_batches import difference  # noqa: E402
from recorded_cases import LOSS_CASES, MODES, OTHER_CASES, cases  # noqa: E402

CASE = "loss sapo, packed"


def call(command: str, folder: Path) -> tuple[int, dict[str, Any]]:
    arguments = "--ranks", "1", "--only", CASE
    done = run(BENCHMARKS / "recorded_batches.py", command, folder / "DIR", *arguments, cwd=folder)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_case_is_equal_until_a_recorded_number_changes(tmp_path: Path) -> None:
    assert call("record", tmp_path)[0] == 0
    code, result = call("compare", tmp_path)
    assert (code, result["largest_relative_difference"], result["missing"]) == (0, 0.0, [])
    assert result["compared"] > 10_000
    file = tmp_path / "DIR" / "1" / f"{CASE}.npz"
    with np.load(file) as recorded:
        values = dict(recorded)
    name = "step 2/weights/model.norm.weight"
    assert values[name].any()
    values[name][3] += 1e-9 * np.abs(values[name]).max()
    np.savez(file, **values, gone=np.zeros(1))  # type: ignore[arg-type]
    code, result = call("compare", tmp_path)
    assert code == 1
    assert result["where"] == f"{CASE}, ranks 1: {name}"
    assert 1e-10 < result["largest_relative_difference"] < 1e-8
    assert result["by_mode"]["packed"] == result["largest_relative_difference"]
    assert result["missing"] == [f"{CASE}, ranks 1: gone"]


@pytest.mark.parametrize(
    ("old", "new", "least", "expected"),
    [
        ([2.0, 2.0], [2.0, 2.5], 0.0, 0.2),  # of the larger number
        ([5.0, 0.0], [5.0, 1e-3], 0.0, 1e-3 / np.sqrt(12.5)),  # of the root mean square
        ([1e-17], [2e-17], 0.01, 1e-15),
        ([0.0], [0.0], 0.0, 0.0),
        ([1.0], [-1.0], 0.0, 2.0),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0, 0.0),
        ([np.nan, 1.0], [0.0, 1.0], 0.0, 2.0),
        ([1.0], [np.inf], 0.0, 2.0),
        ([], [], 0.0, 0.0),
    ],
)
def test_differences_by_hand(old: list[float], new: list[float], least: float, expected: float) -> None:
    assert difference(np.array(old), np.array(new), least) == pytest.approx(expected, rel=1e-12)


def test_each_built_in_component_and_each_mode_has_a_case(tmp_path: Path) -> None:
    changes = "; ".join([*LOSS_CASES.values(), *OTHER_CASES.values()])
    listed = json.loads(run("-m", "grpox", "plugins", "list", "--json", cwd=tmp_path).stdout)
    for kind in ("loss", "advantage", "correction"):
        names = [row["name"] for row in listed if (row["kind"], row["distribution"]) == (kind, "grpox")]
        assert len(names) > 5
        used = [name for name in names if f"{kind}={name}" in changes or f"{kind}={{name: {name}," in changes]
        assert {*names} - {*used} <= {"none"}
    for ranks in (1, 2):
        assert {mode for mode, _ in cases(ranks).values()} == {*MODES}
        assert {name.partition(",")[0] for name in cases(ranks)} == {*LOSS_CASES, *OTHER_CASES}
