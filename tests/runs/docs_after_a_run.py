"""Trains the run file of README for two steps, then calls the pages' commands that look at what a run left.

    python docs_after_a_run.py FOLDER

What each came to goes to FOLDER/ended.json, in the order of the pages.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.docs_blocks import Command, files_of, training_left_out
from support.docs_folder import prepare
from support.handlers import Ended, invoke
from test_docs_after_a_run import COMMANDS_AFTER

STEPS = 2
SHORT = {
    "rewards": ["exact"],
    "sampling": {"max_completion_length": 4},
    "checkpoint": {"every": 1},
    "evaluation": {
        "path": "few.jsonl",
        "accuracy": "exact",
        "every": 1,
        "early_stop": {"metric": "accuracy", "patience": 9},
    },
}
"""Settings of the run that stands in for the user's."""


def train() -> None:
    rows = Path("held-out.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("few.jsonl").write_text("".join(rows[:8]), encoding="utf-8")
    run = yaml.safe_load(files_of("README.md")["run.yaml"]) | SHORT
    Path("run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    trained = invoke(["train", "run.yaml", f"train.max_steps={STEPS}"])
    assert trained.code == 0, trained.errors


def name_as_the_pages_do() -> None:
    """The pages call runs by several names, and have one of 100 steps."""
    checkpoints = Path("runs/mine/checkpoints")
    (checkpoints / "step-00000100").symlink_to(max(path.name for path in checkpoints.glob("step-*")))
    for name in ("a", "b", "quickstart", "long"):
        Path("runs", name).symlink_to("mine")


def ended(command: Command) -> Ended:
    with training_left_out():
        return invoke(command.words, command.ranks)


def main(folder: Path) -> None:
    os.chdir(folder)
    os.environ["COLUMNS"] = "120"
    prepare(folder, "README.md")
    train()
    name_as_the_pages_do()
    prepared = [dataclasses.asdict(ended(command)) for command in COMMANDS_AFTER]
    (folder / "ended.json").write_text(json.dumps(prepared), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
