"""Benchmarks run in their small forms on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support import processes

from grpox.runfile.load import load_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from gpu_parts import PARTS  # noqa: E402
from precision import compare  # noqa: E402

SKIPS = {"syncs": "CUDA"}
"""Parts that take their steps on the CPU but measure nothing there, and a word of the reason."""
COMPARED = {
    "attention": ("3 sequences, flex", "3 behind a prompt, flex", "3 behind a prompt, sdpa with a mask")
}
"""Figures of a part that have errors on the CPU too, which the part holds to its tolerances."""


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


def test_bfloat16_is_close_to_float32_on_the_same_rollouts() -> None:
    found = compare(load_run("quickstart"), prompts=8, samples=4, length=4, device=torch.device("cpu"))
    assert found["tokens"] == 8 * 4 * 4
    assert 0 < found["logprob_difference_mean"] <= 0.05
    assert found["gradient_cosine"] >= 0.99
    assert abs(found["gradient_length"] - 1) < 0.05
