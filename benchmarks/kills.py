"""Kills a run at random moments with SIGKILL, resumes it, and compares what it leaves with a run never killed.

Weights, metrics (those of the machine and the moment excepted) and completions have to be equal bit by bit.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from surroundings import surroundings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
from killing import assert_same, kill, start

SETTINGS = (
    "train.max_steps=8",
    "checkpoint.every=2",
    "train.per_device_train_batch_size=16",
    "train.gradient_accumulation_steps=2",
    "train.steps_per_generation=4",
    "train.num_iterations=2",
    "evaluation.every=3",
    "tracking={}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="default: 50")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("overrides", nargs="*", help="of the quickstart, such as generator=vllm-colocate")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = ("quickstart", *SETTINGS, *given.overrides)
        seconds = finish(folder, *settings, "output_dir=runs/whole", ranks=given.ranks)
        moments = random.Random(given.seed)
        kills: list[float] = []
        while len(kills) < given.kills:
            most = given.kills - len(kills)
            of_run, seconds = one_run(folder, settings, given.ranks, seconds, moments, most)
            kills += of_run
            print(f"{len(kills)} kills, all resumed bit by bit", file=sys.stderr, flush=True)
    found = {"kills": len(kills), "equal": len(kills), "ranks": given.ranks, "settings": settings[1:]}
    found |= {"seconds": [round(after, 2) for after in kills]}
    print(json.dumps(found | surroundings(["grpox", "torch", "deepspeed"])))


def one_run(
    folder: Path, settings: tuple[str, ...], ranks: int, seconds: float, moments: random.Random, most: int
) -> tuple[list[float], float]:
    """Kill a run up to three times and let it end.

    Args:
        seconds: that a run takes.

    Returns:
        after how many seconds each kill came, and `seconds`, corrected if the run ended before it was killed.
    """
    killed = folder / "runs" / "killed"
    shutil.rmtree(killed, ignore_errors=True)
    arguments = (*settings, "output_dir=runs/killed")
    kills = []
    for _ in range(min(3, most)):
        began, process = time.monotonic(), start(folder, *arguments, ranks=ranks)
        after = moments.uniform(0.2, 1.0) * seconds
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=after)
            if not kills:  # else it was a part of a run
                seconds = time.monotonic() - began
            break
        kill(process)
        kills.append(after)
        arguments = (*settings, "output_dir=runs/killed", "--resume", "auto")
    finish(folder, *settings, "output_dir=runs/killed", "--resume", "auto", ranks=ranks)
    assert_same(folder / "runs" / "whole", killed)
    return kills, seconds


def finish(folder: Path, *arguments: str, ranks: int) -> float:
    """Run to the end; returns the seconds that took."""
    began = time.monotonic()
    process = start(folder, *arguments, ranks=ranks)
    _, told = process.communicate()
    assert process.returncode == 0, told
    return time.monotonic() - began


if __name__ == "__main__":
    main()
