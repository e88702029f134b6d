"""The recipes of episodes on several seeds: greedy success on held-out prompts, and the time it takes.

    python benchmarks/episode_recipes.py [--recipes calculator guess] [--seeds 0 1 2] [--out FILE.json]

Each seed is a run of the command line in a process of its own, in a temporary folder. The last line is a JSON
object with every figure, the versions and the hardware.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from outcome import add_out, tell
from rich.console import Console
from rich.table import Table
from surroundings import surroundings

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed", "mlflow")
FIGURES = (
    "success_before",
    "success_after",
    "calls_without_carry_before",
    "calls_without_carry_after",
    "train_seconds",
    "steps",
)


def train(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run; returns its summary and the seconds of the whole command, start-up included."""
    command = [str(Path(sys.executable).with_name("grpox")), "train", recipe, f"train.seed={seed}"]
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    summary = json.loads((folder / "runs" / recipe / "summary.json").read_text())
    figures = {name: summary[name] for name in FIGURES if name in summary}
    return {"seed": seed, "command_seconds": seconds, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["calculator", "guess"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add_out(parser)
    arguments = parser.parse_args()

    recipes = {}
    for recipe in arguments.recipes:
        runs = []
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(train(recipe, seed, Path(folder)))
        table = Table(*runs[0], title=recipe)
        for run in runs:
            table.add_row(*(str(round(value, 3)) for value in run.values()))
        Console().print(table)
        recipes[recipe] = {
            "runs": runs,
            "success_before_most": max(run["success_before"] for run in runs),
            "success_after_least": min(run["success_after"] for run in runs),
            "command_seconds_most": max(run["command_seconds"] for run in runs),
        }
    result = {"benchmark": "episode_recipes", "recipes": recipes, **surroundings(LIBRARIES)}
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
