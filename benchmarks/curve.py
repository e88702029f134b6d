"""The curve of a finished run as one JSON object: rewards, loss and evaluations by step, versions and hardware.

python benchmarks/curve.py RUN_DIR [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outcome import add_out, tell
from surroundings import surroundings

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed")
METRICS = (
    "reward",
    "reward_std",
    "loss",
    "kl_old",
    "entropy",
    "grad_norm",
    "completions/mean_length",
    "step_time",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    add_out(parser)
    arguments = parser.parse_args()

    records = [json.loads(line) for line in (arguments.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [
        {"step": record["step"]} | {name: record["metrics"][name] for name in METRICS}
        for record in records
        if "metrics" in record
    ]
    evaluations = [
        {"step": record["step"], "accuracy": record["evaluation"]["accuracy"]}
        for record in records
        if "evaluation" in record
    ]
    run = json.loads((arguments.run_dir / "versions.json").read_text())["source"]
    result = {
        "benchmark": "curve",
        "run": run,
        "steps": steps,
        "evaluations": evaluations,
        **surroundings(LIBRARIES),
    }
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
