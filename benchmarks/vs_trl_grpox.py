"""grpox's side of vs_trl.py: one run, then the seconds of each step and phase, and the rewards.

Usage: vs_trl_grpox.py OUT.json RUN [a.b=c ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grpox.run import train_run
from grpox.runfile.load import load_run


def main(out: str, source: str, overrides: list[str]) -> None:
    run = load_run(source, overrides)
    train_run(run)
    lines = (Path(run.config.output_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [record["metrics"] for record in map(json.loads, lines) if "metrics" in record]
    figures = {
        "step": [step["step_time"] for step in steps],
        # The weights' way to the generator is part of generating.
        "generate": [step["time/generate"] + step["time/sync"] for step in steps],
        "reward": [step["time/reward"] for step in steps],
        "update": [step["time/update"] for step in steps],
        "rewards": [step["reward"] for step in steps],
        "samples": [run.plan.train_batch_size],
    }
    Path(out).write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
