"""Counts what one plain optimizer step of the quickstart executes: files, functions and calls of grpox.

One rank, no evaluation and no tracking. `sys.setprofile` follows `Trainer.train_step` of step 2, and the
threads that it starts or uses; all code under grpox/ and plugins/ counts, with comprehensions and generators.

    python benchmarks/one_step.py [--json] [--functions]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grpox
from grpox.data.schedule import StepPlan
from grpox.runfile.load import load_run
from grpox.training.run import train_run
from grpox.training.trainer import Trainer

ROOTS = tuple(f"{Path(grpox.__file__).parents[1] / folder}/" for folder in ("grpox", "plugins"))
STEP = 2
CHANGES = ("train.max_steps=2", "evaluation=null", "tracking={}")

Calls = Counter[CodeType]


def follow_step(calls: Calls) -> None:
    """Have the trainer count the calls of its step `STEP`."""
    train_step, is_followed = Trainer.train_step, threading.Event()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_followed.is_set() and frame.f_code.co_filename.startswith(ROOTS):
            calls[frame.f_code] += 1

    def followed(trainer: Trainer, plan: StepPlan) -> None:
        if plan.step == STEP:
            is_followed.set()
        try:
            train_step(trainer, plan)
        finally:
            is_followed.clear()

    Trainer.train_step = followed  # type: ignore[method-assign,assignment]
    threading.setprofile(count)
    sys.setprofile(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--functions", action="store_true", help="list the functions with their calls")
    options = parser.parse_args()
    calls: Calls = Counter()
    follow_step(calls)
    with tempfile.TemporaryDirectory() as folder:
        train_run(load_run("quickstart", [*CHANGES, f"output_dir={folder}/run"]))
    sys.setprofile(None)
    figures = {
        "files": len({code.co_filename for code in calls}),
        "functions": len(calls),
        "calls": calls.total(),
    }
    if options.functions:
        for code, count in calls.most_common():
            print(f"{count:6d} {code.co_filename}:{code.co_firstlineno} {code.co_qualname}")
    print(json.dumps(figures) if options.json else figures)


if __name__ == "__main__":
    main()
