"""Agreement of `grpox plan --memory` with the memory of a run, on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import patient

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory_plan.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process's own memory is told by /proc")
def test_the_peak_is_within_its_tolerance(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(600), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    [point] = result["points"]
    assert point["point"]["ranks"] == 2
    for name in ("peak", "generate", "update", "reduce", "step"):
        assert abs(point["off"][name]) < result["goal"], point
