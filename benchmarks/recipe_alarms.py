"""Bundled recipes by the command line: which alarms they raise, their rewards at both ends, and the time.

    python benchmarks/recipe_alarms.py lake guess [--keys train.max_steps=60 ...] [--out FILE.json]

Each recipe is copied into the working directory and trained there, in a process of its own; the runs stay. The
keys of the run file apply to all recipes named. FILE.json keeps the entries of other recipes, so that recipes
that need other keys can follow. The last line is a JSON object with every figure, the versions and the
hardware.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from outcome import add_out, tell
from rich.console import Console
from rich.table import Table
from surroundings import surroundings

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed", "mlflow")
GRPOX = str(Path(sys.executable).with_name("grpox"))
ENDS = 5
"""Steps whose mean rewards are averaged for the reward at the beginning and at the end."""
RESULTS = ("accuracy_before", "accuracy_after", "success_before", "success_after")


def train(recipe: str, keys: list[str]) -> dict[str, Any]:
    """Run one recipe; returns its exit code, the seconds of the whole command, and figures of the run."""
    subprocess.run([GRPOX, "recipes", "copy", recipe], check=True)
    start = time.perf_counter()
    done = subprocess.run([GRPOX, "train", f"{recipe}.yaml", *keys], stdout=sys.stderr)
    seconds = time.perf_counter() - start
    keys = [key for key in keys if not key.startswith("model.path=")]
    return {"keys": keys, "exit_code": done.returncode, "command_seconds": seconds} | figures_of(recipe)


def figures_of(recipe: str) -> dict[str, Any]:
    """Return alarms, rewards and seconds of a run, also of one that was interrupted."""
    output = Path("runs", recipe)
    alarms, summary = output / "alarms.json", output / "summary.json"
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    metrics = [record["metrics"] for record in records if "metrics" in record]
    rewards = [each["reward"] for each in metrics]
    results = json.loads(summary.read_text()) if summary.exists() else {}
    return {
        "alarms": json.loads(alarms.read_text())["alarms"] if alarms.exists() else [],
        "steps": len(metrics),
        "step_seconds_median": median(each["step_time"] for each in metrics),
        "reward_first_steps": mean(rewards[:ENDS]),
        "reward_last_steps": mean(rewards[-ENDS:]),
        **{name: results[name] for name in RESULTS if name in results},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--keys", nargs="*", default=[], help="keys of the run file")
    add_out(parser)
    arguments = parser.parse_args()

    recipes: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        recipes = json.loads(arguments.out.read_text())["recipes"]
    recipes |= {recipe: train(recipe, arguments.keys) for recipe in arguments.recipes}
    table = Table("recipe", "exit_code", "alarms", "steps", "reward_first_steps", "reward_last_steps")
    for recipe, run in recipes.items():
        cells = (run[str(column.header)] for column in table.columns[1:])
        table.add_row(recipe, *(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)
    result = {
        "benchmark": "recipe_alarms",
        "ends": ENDS,
        "recipes": recipes,
        **surroundings(LIBRARIES),
    }
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
