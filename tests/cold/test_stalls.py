"""Two real ranks of which one fails, vanishes or stands still: the other ends too, and the message names it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import processes
from support.patience import patient
from support.ports import free_port

SMALL = ("train.max_steps=3", "train.per_device_train_batch_size=16", "evaluation=null", "tracking={}")
ON_RANK_1 = """
import ctypes, os, time

def score(completions, **kwargs):
    if os.environ["RANK"] == "1":
        {what}
    return [1.0] * len(completions)
"""
STUCK = """
import ctypes, sys
from pathlib import Path
import grpox.runtime.watchdog
from grpox.config import WatchdogConfig
from grpox.runtime.phases import PhaseTimes

grpox.runtime.watchdog.GRACE = 1.0
times = PhaseTimes()
config = WatchdogConfig(tell_after=0.2, end_after=1.0)
with grpox.runtime.watchdog.Watchdog(config, times, Path("stalls"), 0), times.phase("generate"):
    mutex = ctypes.create_string_buffer(64)
    library = getattr(ctypes, sys.argv[1])(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # for ever, whatever signal comes
"""


@dataclass
class Ended:
    """The end of a rank."""

    code: int
    stderr: str


def run_of(folder: Path, ranks: int, *overrides: str) -> list[Ended]:
    """A run on ranks that no launcher watches: nobody ends one because another has ended."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    command = ["-m", "grpox", "train", "quickstart", *SMALL, *overrides, "output_dir=run"]
    places = [where | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    started = [processes.start(*command, cwd=folder, env=place) for place in places]
    try:
        return [Ended(process.wait(), process.output()[1]) for process in started]
    finally:
        for process in started:
            process.kill()


def reward(folder: Path, what: str) -> str:
    (folder / "mine.py").write_text(ON_RANK_1.format(what=what))
    return "rewards=[{path: mine.py:score, isolation: thread}]"


def test_what_fails_on_one_rank_is_told_on_the_other(tmp_path: Path) -> None:
    zero, one = run_of(tmp_path, 2, reward(tmp_path, "1 / 0"))
    assert (zero.code, one.code) == (1, 1)
    told = "rank 1 failed in phase 'reward': reward 'score' raised ZeroDivisionError: division by zero"
    assert told in zero.stderr
    assert "error: [rank 1] reward 'score' raised ZeroDivisionError" in one.stderr
    assert told in json.loads((tmp_path / "run" / "failure.json").read_text())["error"]
    assert "Traceback" not in zero.stderr + one.stderr


def test_a_rank_that_vanishes_ends_the_other_which_says_how_to_go_on(tmp_path: Path) -> None:
    """The lost rank may be rank 0, which otherwise speaks for all."""
    score = "os._exit(7) if os.environ['RANK'] == '0' and trainer_state.global_step == 2 else 1.0"
    (tmp_path / "mine.py").write_text(
        "import os\n\n\ndef score(completions, trainer_state, **_):\n"
        f"    return [{score} for _ in completions]\n"
    )
    mine = "rewards=[{path: mine.py:score, isolation: thread}]"
    zero, one = run_of(tmp_path, 2, mine, "checkpoint.every=1", "train.max_steps=4")
    assert (zero.code, one.code) == (7, 1)
    assert "rank 1 lost another rank in phase 'gather'" in one.stderr
    assert "to go on: grpox train --resume " in one.stderr
    assert "Traceback" not in one.stderr


def test_a_rank_that_stalls_is_named_and_ends_the_run(tmp_path: Path) -> None:
    watchdog = "watchdog={tell_after: 5, end_after: 25}"
    zero, one = run_of(tmp_path, 2, reward(tmp_path, "time.sleep(10_000)"), watchdog)
    assert (zero.code, one.code) == (1, 1)
    assert "warning: rank 0 has been waiting for the other ranks for " in zero.stderr
    assert "warning: rank 1 has been in phase 'reward' for " in one.stderr
    assert "rank 1 failed in phase 'reward': rank 1 has been in phase 'reward' for " in zero.stderr
    assert 'mine.py", line 6 in score' in (tmp_path / "run" / "stalls" / "rank-00001.txt").read_text()
    assert "Traceback" not in zero.stderr + one.stderr


@pytest.mark.parametrize(
    ("library", "told"),
    [("CDLL", "the process does not react and is ended"), ("PyDLL", "Timeout (")],
    ids=["without Python's lock", "holding Python's lock"],
)
def test_what_no_signal_can_end_is_ended(tmp_path: Path, library: str, told: str) -> None:
    command = [sys.executable, "-c", STUCK, library]
    limit = patient(60)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 1
    assert told in done.stderr
