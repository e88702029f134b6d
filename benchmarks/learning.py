"""Does it learn? The quickstart's task beside TRL on the same seeds, and with each loss and advantage scaler.

    python benchmarks/learning.py trl [--seeds 5] [--steps 100] [--out FILE.json] [--picture FILE.svg]
    python benchmarks/learning.py parts [the same]        needs no TRL

The reward of the quickstart is 1 for the right sum and 0 for any other, so that the mean reward of a step is
the accuracy of what was sampled.

    trl      the recipe through grpox and TRL in turns, with equal seeds: the differences of the pairs, over the
             whole curve, its last quarter, and at the moment when the faster of the two has done all its steps;
             each with its 95 % interval (Student's t). Where it holds 0 the two learn alike.
    parts    the six losses with the scaler `group`, and the three scalers with the loss `dapo`, a run for each
             seed. Each generation batch serves --updates steps (default: 4), and is a point of the curve: with
             one step for each, the ratio is 1 and most losses are the same.

Prints a table and draws the curves, of `parts` less those of dapo with the same seeds: the mean over seeds, and
their spread as a band. The last line is a JSON object with every figure.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learning_picture import draw, draw_differences
from outcome import add_out, tell
from rich.console import Console
from rich.table import Table
from surroundings import surroundings
from vs_trl import Figures, run_side

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed")
PARTS = {
    **{f"loss={name}": [f"loss={name}"] for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo")},
    **{f"advantage={name}": ["loss=dapo", f"advantage={name}"] for name in ("batch", "none")},
}
"""Candidate -> overrides; `loss=dapo` has the scaler `group`."""
BASE = "loss=dapo"
"""From which the others differ."""
SMOOTH = 10
"""Steps whose mean is the accuracy at a moment."""
Curves = list[list[float]]


def interval(differences: Sequence[float]) -> dict[str, Any]:
    """Mean of paired differences and its 95 % interval by Student's t, n - 1 degrees of freedom."""
    from scipy.stats import t

    count, mean = len(differences), statistics.mean(differences)
    error = statistics.stdev(differences) / count**0.5 if count > 1 else float("inf")
    reach = float(t.ppf(0.975, max(count - 1, 1))) * error
    return {"mean": mean, "least": mean - reach, "most": mean + reach, "of_seeds": list(differences)}


def last_quarter(curve: Sequence[float]) -> float:
    return statistics.mean(curve[-max(1, len(curve) // 4) :])


def at_second(run: Figures, second: float) -> float:
    """The accuracy when `second` seconds of steps are over: the mean of the steps just before."""
    done = sum(passed <= second for passed in itertools.accumulate(run["step"]))
    return statistics.mean(run["rewards"][max(0, done - SMOOTH) : max(1, done)])


def against_trl(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    runs: dict[str, list[Figures]] = {"grpox": [], "trl": []}
    for seed in range(arguments.seeds):
        for side in sorted(runs, reverse=bool(seed % 2)):
            runs[side].append(run_side(side, "quickstart", [*overrides, f"train.seed={seed}"]))
            _progress(f"seed {seed}  {side}", runs[side][-1])
    pairs = list(zip(runs["grpox"], runs["trl"], strict=True))
    ends = [min(sum(ours["step"]), sum(theirs["step"])) for ours, theirs in pairs]
    return {
        "curves": {side: [run["rewards"] for run in runs[side]] for side in runs},
        "seconds": {side: [sum(run["step"]) for run in runs[side]] for side in runs},
        "differences": {
            "grpox - TRL, whole curve": interval(
                [statistics.mean(a["rewards"]) - statistics.mean(b["rewards"]) for a, b in pairs]
            ),
            "grpox - TRL, last quarter": interval(
                [last_quarter(a["rewards"]) - last_quarter(b["rewards"]) for a, b in pairs]
            ),
            "grpox - TRL, equal seconds": interval(
                [at_second(a, end) - at_second(b, end) for (a, b), end in zip(pairs, ends, strict=True)]
            ),
        },
    }


def of_parts(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    curves: dict[str, Curves] = {name: [] for name in PARTS}
    for seed in range(arguments.seeds):
        for name, own in PARTS.items():
            told = [*overrides, f"train.num_iterations={arguments.updates}", *own, f"train.seed={seed}"]
            run = run_side("grpox", "quickstart", told)
            curves[name].append(run["rewards"])
            _progress(f"seed {seed}  {name}", run)
    ends = {name: [last_quarter(curve) for curve in of_seeds] for name, of_seeds in curves.items()}
    less = {name: [a - b for a, b in zip(of_seeds, ends[BASE], strict=True)] for name, of_seeds in ends.items()}
    return {
        "updates": arguments.updates,
        "curves": curves,
        "last_quarter": ends,
        "differences": {
            f"{name} - {BASE}, last quarter": interval(each) for name, each in less.items() if name != BASE
        },
    }


def _progress(name: str, run: Figures) -> None:
    print(
        f"{name:24} last quarter {last_quarter(run['rewards']):.3f}  {sum(run['step']):.0f} s", file=sys.stderr
    )


def show(result: dict[str, Any]) -> None:
    table = Table("", "whole curve", "last quarter", "least", "most", title="accuracy of what is sampled")
    for name, curves in result["curves"].items():
        ends = [last_quarter(curve) for curve in curves]
        whole = statistics.mean(statistics.mean(curve) for curve in curves)
        cells = (whole, statistics.mean(ends), min(ends), max(ends))
        table.add_row(name, *(f"{cell:.3f}" for cell in cells))
    Console().print(table)
    for name, own in result["differences"].items():
        interval_told = f"95 % interval {own['least']:+.4f} to {own['most']:+.4f}"
        Console().print(f"{name}: {own['mean']:+.4f}, {interval_told}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=["trl", "parts"])
    parser.add_argument("override", nargs="*", help="a.b=c, of the recipe, for all runs")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of a run (default: 100)")
    parser.add_argument("--updates", type=int, default=4, help="of parts: steps on a batch (default: 4)")
    parser.add_argument("--quick", action="store_true", help="two seeds of four steps")
    parser.add_argument("--picture", type=Path, default=Path("learning.svg"), help="(default: %(default)s)")
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps = 2, 4
    return arguments


def main() -> None:
    arguments = parsed()
    overrides = [f"train.max_steps={arguments.steps}", "evaluation=null", "tracking={}", "checkpoint.every=0"]
    overrides += ["logging.completions_every=0", "logging.save_completions_every=0", *arguments.override]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measure = against_trl if arguments.part == "trl" else of_parts
    libraries = (*LIBRARIES, "trl") if arguments.part == "trl" else LIBRARIES
    result = {
        "benchmark": "learning",
        "part": arguments.part,
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "overrides": arguments.override,
        **measure(arguments, overrides),
        **surroundings(libraries),
    }
    show(result)
    if arguments.part == "trl":
        draw(result["curves"], arguments.picture)
    else:
        draw_differences(result["curves"], BASE, arguments.picture)
    Console().print(f"picture: {arguments.picture}")
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
