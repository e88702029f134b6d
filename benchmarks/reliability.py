"""Everything that is promised of a run's reliability, measured by one command: a few hours on two cores.

Kills resumed bit by bit, outages of the tracker, bad inputs, and what checkpoints cost. Each is a benchmark of
its own beside this one; the JSON object that it prints is collected in results/reliability.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "reliability.json"
PARTS = {
    "kills": ["kills.py"],
    "kills_2_ranks": ["kills.py", "--ranks", "2", "--kills", "10"],
    "kills_vllm": ["kills.py", "--kills", "10", "generator=vllm-colocate"],
    "outages": ["outages.py"],
    # Each is a process that starts anew; the tests run all of them, in one.
    "bad_inputs": ["bad_inputs.py", "--every", "3"],
    "checkpoint_cost": ["checkpoint_cost.py"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"default: all of {', '.join(PARTS)}")
    given = parser.parse_args()
    if unknown := sorted(set(given.parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}")
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in given.parts or PARTS:
        print(f"{part}: {' '.join(PARTS[part])}", file=sys.stderr, flush=True)
        found[part] = measured(PARTS[part]) | {"command": f"python benchmarks/{' '.join(PARTS[part])}"}
        RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def measured(command: list[str]) -> dict[str, Any]:
    """The JSON object that a benchmark prints at the end; a goal that it misses is no reason to stop."""
    script, *arguments = command
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    before, brace, rest = f"\n{done.stdout}".rpartition("\n{")
    if not brace:
        sys.exit(f"{script} ended with exit code {done.returncode} and printed no figures\n{before}")
    last: dict[str, Any] = json.loads("{" + rest)
    return last


if __name__ == "__main__":
    main()
