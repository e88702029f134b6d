"""The quickstart on several seeds: held-out accuracy before and after, and the time it takes.

    python benchmarks/quickstart_seeds.py [--seeds 0 1 2] [--out FILE.json] [key=value ...]

Each seed is a run of the command line in a process of its own, in a temporary folder. Further arguments are
keys of the run file, such as model.dtype=bfloat16. The last line is a JSON object with every figure, the
versions and the hardware.
"""

from __future__ import annotations

import argparse
import json
import statistics
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


def train(seed: int, keys: list[str], folder: Path) -> dict[str, Any]:
    """One run; returns its summary and the seconds of the whole command, start-up included."""
    command = [str(Path(sys.executable).with_name("grpox")), "train", "quickstart", f"train.seed={seed}", *keys]
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    summary = json.loads((folder / "runs" / "quickstart" / "summary.json").read_text())
    figures = ("accuracy_before", "accuracy_after", "train_seconds", "steps")
    return {"seed": seed, "command_seconds": seconds, **{name: summary[name] for name in figures}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("keys", nargs="*", help="keys of the run file")
    add_out(parser)
    arguments = parser.parse_args()

    runs = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(train(seed, arguments.keys, Path(folder)))
    table = Table(*runs[0], title="quickstart")
    for run in runs:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in run.values()))
    Console().print(table)
    result = {
        "benchmark": "quickstart_seeds",
        "keys": arguments.keys,
        "runs": runs,
        "accuracy_after_least": min(run["accuracy_after"] for run in runs),
        "command_seconds_median": statistics.median(run["command_seconds"] for run in runs),
        **surroundings(LIBRARIES),
    }
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
