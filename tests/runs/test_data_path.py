"""A prompt's way through the code is short enough to be read."""

from __future__ import annotations

import json
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
    done = run("count.py", cwd=folder)
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
