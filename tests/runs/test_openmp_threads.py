"""A run on a CPU has no more OpenMP threads than it was given."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.processes import run

COUNTING = """
import json, sys
from pathlib import Path

import grpox.policy.engine
from grpox.cli import main

step = grpox.policy.engine.Engine.step


def count(*arguments):
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    Path("names.json").write_text(json.dumps(names))
    return step(*arguments)


grpox.policy.engine.Engine.step = count
sys.argv = ["grpox", "train", "quickstart", "train.max_steps=1", "evaluation=null", "output_dir=run"]
main()
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
def test_the_threads_of_gloo_have_no_openmp_threads(folder: Path) -> None:
    (folder / "count.py").write_text(COUNTING)
    done = run("count.py", cwd=folder, env={"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr[-3000:]
    names = Counter(json.loads((folder / "names.json").read_text()))
    # A process group has a thread that listens and two that work. An OpenMP thread has its creator's name.
    assert names["gloo_tcp_loop"] >= 1
    assert names["pt_gloo_runloop"] == 2 * names["gloo_tcp_loop"], names
