"""Inside a run: a prompt's way through the code is short enough to be read, and gloo's threads are few."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.processes import run

COUNTING = """
import json, sys, threading
from pathlib import Path
from types import FrameType

import grpox.data.schedule, grpox.policy.engine
from grpox.cli import main

DRAWS = grpox.data.schedule.PromptSampler.prompts_for.__code__
STEPS = grpox.policy.engine.Engine.step.__code__
ROOTS = [Path(grpox.__file__).parents[1] / part for part in ("grpox", "plugins/builtin")]
files, ended = set(), []


def profile(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event != "call" or ended or not (files or code is DRAWS):
        return
    if any(Path(code.co_filename).is_relative_to(root) for root in ROOTS):
        files.add(code.co_filename)
    if code is STEPS:
        names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
        Path("threads.json").write_text(json.dumps(names))
        ended.append(True)


threading.setprofile(profile)
sys.setprofile(profile)
sys.argv = ["grpox", "train", "quickstart", "train.max_steps=1", "evaluation=null", "output_dir=run"]
try:
    main()
finally:
    sys.setprofile(None)
    names = (str(Path(file).relative_to(ROOTS[0].parent)) for file in files)
    Path("files.json").write_text(json.dumps(sorted(names)))
"""


@pytest.fixture(scope="module")
def entered(folder: Path) -> list[str]:
    """Files in which a function is called from the draw of a prompt to the optimizer's step, in any thread."""
    (folder / "count.py").write_text(COUNTING)
    done = run("count.py", cwd=folder, env={"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "files.json").read_text())


def test_a_prompt_passes_few_files_to_the_optimizers_step(entered: list[str]) -> None:
    # Every room uses these; the last is a thread that measures the machine now and then.
    beside = ("grpox/errors/", "grpox/runtime/", "grpox/contracts.py", "grpox/observing/machine_metrics.py")
    files = [name for name in entered if not name.startswith(beside)]
    assert len(files) <= 25, "\n".join(files)


def test_the_way_begins_with_the_data_and_ends_with_the_update(entered: list[str]) -> None:
    rooms = {name.rpartition("/")[0] for name in entered}
    assert {"grpox/data", "grpox/rollout", "grpox/policy", "grpox/update"} < rooms


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
@pytest.mark.usefixtures("entered")
def test_the_threads_of_gloo_have_no_openmp_threads(folder: Path) -> None:
    names = Counter(json.loads((folder / "threads.json").read_text()))
    # A process group has a thread that listens and two that work. An OpenMP thread has its creator's name.
    assert names["gloo_tcp_loop"] >= 1
    assert names["pt_gloo_runloop"] == 2 * names["gloo_tcp_loop"], names
