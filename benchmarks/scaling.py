"""Growth of a step's time with tokens, group size and ranks, and the framework's own share of it.

    python benchmarks/scaling.py [--steps 8] [--repeats 1] [--out FILE.json] [a.b=c ...]
    python benchmarks/scaling.py --quick                  a few points of few steps

Whole steps of real runs, on varied work: the mean length is a third of the longest, 60 % of the groups teach.
The model is a Llama of random weights (hidden size 256, 4 layers, 4 million parameters), or that of
--model-path. From a base of 32 completions in groups of 8, of up to 64 tokens, on one rank, one thing is
changed at a time:

    tokens    the longest completion
    group     completions of a prompt, at 32 completions in all
    ranks     processes, at the same 32 completions in all

Each point is a run of its own, the points in turns where there are several repeats; figures are medians over
the steps after warm-up, with the least and the most.

The framework's overhead is measured in runs whose model (hidden size 8, one layer), generator and reward take
no time: seconds from one step to the next, less those in DeepSpeed (forward, backward, step, gathering of
weights), generator and reward function. Three runs write nothing but metrics; three, in turns with them, write
all that a run does by default (MLflow, completions). The last line is a JSON object with every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcome import add_out, tell
from random_model import make_model
from rich.console import Console
from rich.table import Table
from surroundings import surroundings
from varied_run import varied_overrides

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed")
HERE = Path(__file__).parent
BASE = {"longest": 64, "group": 8, "ranks": 1}
ROWS, MICRO_BATCH = 32, 8
POINTS = {"longest": (16, 32, 64, 128), "group": (4, 8, 16, 32), "ranks": (1, 2)}
QUICK = {"longest": (16, 64), "group": (8,), "ranks": (1, 2)}
PHASES = ("step", "generate", "update", "reward")
QUIET = ("tracking={}", "logging.completions_every=0", "logging.save_completions_every=0", "checkpoint.every=0")
GOAL = 0.02
"""Seconds a step that the framework itself may take."""
OVERHEAD_RUNS = 3
WARM_UP = 2
Figures = dict[str, list[float]]


def run(script: str, source: str, overrides: Sequence[str], ranks: int = 1) -> Figures:
    """Return the figures that `script` wrote about a run."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        own = [f"output_dir={folder}/run"]
        command = [sys.executable, *launcher, str(HERE / script), str(out), source, *overrides, *own]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            sys.exit(f"{script} failed:\n{done.stderr[-3000:]}")
        figures: Figures = json.loads(out.read_text())
    return figures


def batch_overrides(point: dict[str, int], steps: int) -> list[str]:
    return [
        f"train.max_steps={steps}",
        f"train.per_device_train_batch_size={MICRO_BATCH // point['ranks']}",
        f"train.gradient_accumulation_steps={ROWS // MICRO_BATCH}",
        f"train.num_generations={point['group']}",
        f"sampling.max_completion_length={point['longest']}",
        "train.warmup_steps=0",
        "evaluation=null",
    ]


def points_of(axes: dict[str, tuple[int, ...]]) -> list[dict[str, int]]:
    """Each once, though the base is on every axis."""
    made = [BASE | {axis: value} for axis, values in axes.items() for value in values]
    return [point for number, point in enumerate(made) if point not in made[:number]]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def scaling(points: list[dict[str, int]], arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Seconds of each point's steps and phases, all repeats together."""
    taken: list[list[Figures]] = [[] for _ in points]
    for repeat in range(arguments.repeats):
        for number, point in enumerate(points):
            overrides = [*batch_overrides(point, arguments.steps + WARM_UP), *QUIET, f"model.path={model}"]
            overrides += arguments.override
            with tempfile.TemporaryDirectory() as data:
                overrides += varied_overrides("quickstart", overrides, Path(data))
                found = run("vs_trl_grpox.py", "quickstart", overrides, point["ranks"])
            taken[number].append(found)
            told = " ".join(f"{key} {value}" for key, value in point.items())
            seconds = statistics.median(found["step"][WARM_UP:])
            print(f"repeat {repeat + 1}/{arguments.repeats}  {told:30} {seconds:7.3f} s", file=sys.stderr)
    return [
        point
        | {phase: spread([s for run in runs for s in run[phase][WARM_UP:]]) for phase in PHASES}
        | {"completion_tokens": statistics.mean(runs[0]["mean_length"]) * ROWS}
        for point, runs in zip(points, taken, strict=True)
    ]


def overheads(steps: int, runs: int, model: str) -> dict[str, dict[str, Any]]:
    """Seconds of a step that are spent neither in DeepSpeed nor in the generator or reward; runs in turns."""
    taken: dict[str, list[Figures]] = {"metrics alone": [], "as by default": []}
    for _ in range(runs):
        for name, made in taken.items():
            made.append(overhead(steps, name == "as by default", model))
            told = 1000 * statistics.median(made[-1]["overhead"])
            print(f"overhead, {name}: {told:.1f} ms", file=sys.stderr)
    return {
        name: {key: spread([seconds for each in made for seconds in each[key]]) for key in made[0]}
        | {"overhead_of_runs": [statistics.median(each["overhead"]) for each in made]}
        for name, made in taken.items()
    }


def overhead(steps: int, tracked: bool, model: str) -> Figures:
    """The same of one run, each step's."""
    stub = HERE / "no_cost.py"
    own = [f"generator={{path: '{stub}:Instant'}}", f"model.path={model}"]
    own += [f"rewards=[{{path: '{stub}:length', isolation: thread}}]"]
    own += ["checkpoint.every=0"] if tracked else QUIET
    figures = run("overhead_run.py", "quickstart", [*batch_overrides(BASE, steps + WARM_UP), *own])
    step, elsewhere = figures["step"][WARM_UP:], figures["elsewhere"][WARM_UP:]
    return {"step": step, "overhead": [s - e for s, e in zip(step, elsewhere, strict=True)]}


def show(result: dict[str, Any], axes: dict[str, tuple[int, ...]]) -> None:
    table = Table("axis", "value", "step, s", "least", "most", "generate", "update", "to base")
    found = {tuple(point[key] for key in BASE): point for point in result["points"]}
    base = found[tuple(BASE.values())]["step"]["median"]
    for axis, values in axes.items():
        for value in values:
            point = found[tuple((BASE | {axis: value}).values())]
            step = point["step"]
            cells = [step["median"], step["least"], step["most"]]
            cells += [point["generate"]["median"], point["update"]["median"], step["median"] / base]
            table.add_row(axis, str(value), *(f"{cell:.3f}" for cell in cells))
    Console().print(table)
    for name, own in result["overhead"].items():
        told = {key: f"{1000 * value:.1f}" for key, value in own["overhead"].items()}
        step = 1000 * own["step"]["median"]
        Console().print(
            f"the framework itself, {name}: {told['median']} ms a step ({told['least']} to {told['most']}), "
            f"of {step:.1f} ms with DeepSpeed at no model cost"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("override", nargs="*", help="a.b=c, of the run file, for all points but the overhead's")
    parser.add_argument("--model-path", type=Path, help="model folder in place of the random one")
    parser.add_argument("--steps", type=int, default=8, help="of each run, after two of warm-up (default: 8)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each point (default: 1)")
    parser.add_argument("--quick", action="store_true", help="fewer points, three steps each")
    add_out(parser)
    arguments = parser.parse_args()
    axes = QUICK if arguments.quick else POINTS
    arguments.steps = 3 if arguments.quick else arguments.steps
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        tiny, small = Path(folder, "tiny"), Path(folder, "small")
        make_model(tiny, hidden=8, layers=1)
        make_model(small, hidden=256, layers=4)
        model = str((arguments.model_path or small).absolute())
        own = overheads(40 * arguments.steps, 1 if arguments.quick else OVERHEAD_RUNS, str(tiny))
        points = scaling(points_of(axes), arguments, model)
    result = {
        "benchmark": "scaling",
        "model": str(arguments.model_path or "random, hidden size 256, 4 layers"),
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "overrides": arguments.override,
        "completions": ROWS,
        "points": points,
        "overhead": own,
        "goal_overhead_seconds": GOAL,
        **surroundings(LIBRARIES),
    }
    show(result, axes)
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
