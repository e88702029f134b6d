"""The recipe lake with the advantages gigpo and group: greedy success on held-out maps, and the time it takes.

    python benchmarks/lake.py [--seeds 0 1 2] [--advantages gigpo group] [--out FILE.json] [key=value ...]

Each run is the command line in a process of its own, in a temporary folder; further arguments are keys of the
run file. It evaluates every 20 steps. The model of the warm start also plays groups of 16 episodes on 50 maps,
which tell how often states recur. The last line is a JSON object with every figure, the versions and the
hardware.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from outcome import add_out, tell
from rich.console import Console
from rich.table import Table
from surroundings import surroundings

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed", "mlflow")
ROOT = Path(__file__).parents[1]
MAPS, GROUP = 50, 16
EVERY = 20


def train(advantage: str, seed: int, keys: list[str], folder: Path) -> dict[str, Any]:
    """One run; returns its summary, the seconds of the whole command and the success at each evaluation."""
    changes = [f"advantage={advantage}", f"train.seed={seed}", f"evaluation.every={EVERY}", *keys]
    command = [str(Path(sys.executable).with_name("grpox")), "train", "lake", *changes]
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    output = folder / "runs" / "lake"
    summary = json.loads((output / "summary.json").read_text())
    figures = {name: summary[name] for name in ("success_before", "success_after", "train_seconds", "steps")}
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    curve = {line["step"]: line["evaluation"]["success"] for line in lines if "evaluation" in line}
    return {"advantage": advantage, "seed": seed, "command_seconds": seconds, **figures, "success": curve}


def recurrence() -> dict[str, float]:
    """Count turns of the warm-started model whose state another turn of the group began in."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    from lake import RECIPE, play

    torch.manual_seed(0)
    maps = [json.loads(line)["map"] for line in (RECIPE / "train.jsonl").read_text().splitlines()[:MAPS]]
    model = AutoModelForCausalLM.from_pretrained(RECIPE / "model")
    tokenizer = AutoTokenizer.from_pretrained(RECIPE / "model")
    shared = turns = 0
    for text in maps:
        states = Counter(
            state for _, visited in play(model, tokenizer, [text] * GROUP, True) for state in visited
        )
        turns += states.total()
        shared += sum(count for count in states.values() if count > 1)
    return {"turns": turns / MAPS / GROUP, "share_of_turns_in_shared_states": shared / turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--advantages", nargs="+", default=["gigpo", "group"])
    parser.add_argument("keys", nargs="*", help="keys of the run file, such as train.max_steps=40")
    add_out(parser)
    arguments = parser.parse_args()

    runs = []
    for seed in arguments.seeds:
        for advantage in arguments.advantages:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(train(advantage, seed, arguments.keys, Path(folder)))
                print(json.dumps(runs[-1]), flush=True)
    columns = [name for name in runs[0] if name != "success"]
    table = Table(*columns, title="lake")
    for run in runs:
        cells = (run[name] for name in columns)
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)
    tell({"benchmark": "lake", **recurrence(), "runs": runs, **surroundings(LIBRARIES)}, arguments.out)


if __name__ == "__main__":
    main()
