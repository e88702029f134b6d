"""Benchmarks run in their small forms, and a number that differs or an error out of tolerance is a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support import processes

from grpox.runfile.load import load_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_part  # noqa: E402
from gpu_parts import PARTS  # noqa: E402
from gpu_parts.part import Part  # noqa: E402
from precision import compare  # noqa: E402

SKIPS = {"syncs": "CUDA"}
"""Parts that take their steps on the CPU but measure nothing there, and a word of the reason."""
COMPARED = {
    "attention": ("3 sequences, flex", "3 behind a prompt, flex", "3 behind a prompt, sdpa with a mask")
}
"""Figures of a part that have errors on the CPU too, which the part holds to its tolerances."""
CASE = "loss sapo, packed"


@pytest.mark.parametrize("name", [name for name, plan in PARTS.items() if not plan.gpus])
def test_the_small_form_of_a_part_of_gpu_py_runs_on_the_cpu(tmp_path: Path, name: str) -> None:
    arguments, out = tmp_path / "arguments.json", tmp_path / "figures.json"
    given = {"name": name, "device": "cpu", "small": True, "folder": str(tmp_path), "out": str(out)}
    arguments.write_text(json.dumps(given))
    done = processes.run(BENCHMARKS / "gpu_part.py", arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    part = json.loads(out.read_text())
    assert part["status"] == ("skipped" if name in SKIPS else "ok"), part["reason"]
    assert SKIPS.get(name, "") in part["reason"]
    assert all(part[place]["errors"] for place in COMPARED.get(name, ()))


def test_gpu_py_writes_a_file_with_the_environment_and_each_part(tmp_path: Path) -> None:
    options = "--device=cpu", "--small", "--out=gpu.json", "--parts=ceilings,multi_gpu"
    done = processes.run(BENCHMARKS / "gpu.py", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result
    assert result["environment"]["versions"]["torch"] == torch.__version__
    parts = {name: part["status"] for name, part in result["parts"].items()}
    assert parts == {"ceilings": "ok", "multi_gpu": "skipped"}


def test_a_part_that_raises_keeps_its_figures_and_failed_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(part: Part) -> None:
        part.record("before", 7)
        part.check("the error", float("nan"), 0.25)
        part.check("another", 0.25, 0.25)
        raise ValueError("no kernel for this")

    module = ModuleType("gpu_parts.mine")
    module.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpu_parts.mine", module)
    part = Part(torch.device("cpu"), True, tmp_path, tmp_path / "out.json")
    gpu_part.run_part(part, "mine")
    assert json.loads(part.out.read_text()) == {
        "status": "failed",
        "reason": "the error is nan, more than 0.25; ValueError: no kernel for this",
        "before": 7,
    }


def recorded(command: str, folder: Path) -> tuple[int, dict[str, Any]]:
    arguments = command, folder / "DIR", "--ranks", "1", "--only", CASE
    done = processes.run(BENCHMARKS / "recorded_batches.py", *arguments, cwd=folder)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_recorded_batch_is_equal_until_one_of_its_numbers_changes(tmp_path: Path) -> None:
    assert recorded("record", tmp_path)[0] == 0
    code, result = recorded("compare", tmp_path)
    assert (code, result["largest_relative_difference"], result["missing"]) == (0, 0.0, [])
    assert result["compared"] > 10_000
    file = tmp_path / "DIR" / "1" / f"{CASE}.npz"
    with np.load(file) as old:
        values = dict(old)
    name = "step 2/weights/model.norm.weight"
    assert values[name].any()
    values[name][3] += 1e-9 * np.abs(values[name]).max()
    np.savez(file, **values, gone=np.zeros(1))  # type: ignore[arg-type]
    code, result = recorded("compare", tmp_path)
    assert (code, result["where"]) == (1, f"{CASE}, ranks 1: {name}")
    assert 1e-10 < result["largest_relative_difference"] < 1e-8
    assert result["missing"] == [f"{CASE}, ranks 1: gone"]


def test_bfloat16_is_close_to_float32_on_the_same_rollouts() -> None:
    found = compare(load_run("quickstart"), prompts=8, samples=4, length=4, device=torch.device("cpu"))
    assert found["tokens"] == 8 * 4 * 4
    assert 0 < found["logprob_difference_mean"] <= 0.05
    assert found["gradient_cosine"] >= 0.99
    assert abs(found["gradient_length"] - 1) < 0.05
