"""grpox against TRL on the same work: samples per second, the time of each phase, and the reward curves.

    python benchmarks/vs_trl.py [--model quickstart|smollm2|RUN.yaml] [--model-path FOLDER] [--steps N]
                                [--repeats R] [--generator hf] [--out FILE.json]

A bundled recipe (or any run file) says model, prompts, reward, sampling and batch sizes; TRL is given the same,
at its best settings for one CPU process: plain PyTorch without DeepSpeed, no gradient checkpointing, no logging
to a tracker. grpox runs on ZeRO-3 as it always does. The two take turns, each run in a process of its own, and
the first steps of each run are left out as warm-up. The last line is a JSON object with every figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from surroundings import surroundings

LIBRARIES = ("grpox", "trl", "torch", "transformers", "deepspeed", "accelerate")
PHASES = ("generate", "reward", "update", "step")
SIDES = {"grpox": "vs_trl_grpox.py", "trl": "vs_trl_trl.py"}


def run_side(side: str, run: str, overrides: Sequence[str]) -> dict[str, list[float]]:
    """One run of `side` in a process of its own: phase -> seconds a step; rewards -> mean of each."""
    script = Path(__file__).with_name(SIDES[side])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, str(script), str(out), run, *overrides, f"output_dir={folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
        figures: dict[str, list[float]] = json.loads(out.read_text())
    return figures


def compare(runs: dict[str, list[dict[str, list[float]]]], warmup: int, batch: int) -> dict[str, Any]:
    """Medians over the steps of each repeat; ratios pair the repeats, TRL's time over grpox's."""
    medians = {
        side: [{phase: statistics.median(run[phase][warmup:]) for phase in PHASES} for run in repeats]
        for side, repeats in runs.items()
    }
    ratios = {
        phase: [
            theirs[phase] / ours[phase] for ours, theirs in zip(medians["grpox"], medians["trl"], strict=True)
        ]
        for phase in PHASES
    }
    return {
        "ratio_samples_per_second": statistics.median(ratios["step"]),
        "ratio_samples_per_second_of_repeats": ratios["step"],
        "samples_per_second": {
            side: batch / statistics.median(m["step"] for m in medians[side]) for side in medians
        },
        "phases": {
            phase: {
                "grpox_seconds": statistics.median(m[phase] for m in medians["grpox"]),
                "trl_seconds": statistics.median(m[phase] for m in medians["trl"]),
                "ratio": statistics.median(ratios[phase]),
            }
            for phase in PHASES
        },
        "rewards": reward_difference(runs),
    }


def reward_difference(runs: dict[str, list[dict[str, list[float]]]]) -> dict[str, Any]:
    """How far the curves of mean reward differ at equal seeds; between two seeds of one side, as a measure.

    The two draw their samples from different random streams, so that even identical algorithms differ.
    """
    ours, theirs = ([run["rewards"] for run in runs[side]] for side in ("grpox", "trl"))
    pairs = [_distance(a, b) for a, b in zip(ours, theirs, strict=True)]
    result: dict[str, Any] = {
        "grpox": ours,
        "trl": theirs,
        "mean_difference_at_equal_seeds": statistics.mean(pairs),
        "last_quarter": {
            side: statistics.mean(statistics.mean(curve[-max(1, len(curve) // 4) :]) for curve in curves)
            for side, curves in (("grpox", ours), ("trl", theirs))
        },
    }
    if len(ours) > 1:
        result["mean_difference_between_seeds"] = {
            side: statistics.mean(_distance(a, b) for a, b in itertools.pairwise(curves))
            for side, curves in (("grpox", ours), ("trl", theirs))
        }
    return result


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.mean(abs(a - b) for a, b in zip(one, other, strict=True))


def show(result: dict[str, Any]) -> None:
    table = Table("phase", "grpox, s", "TRL, s", "TRL / grpox", title=f"{result['run']}: seconds a step")
    for phase, figures in result["phases"].items():
        table.add_row(
            phase, f"{figures['grpox_seconds']:.3f}", f"{figures['trl_seconds']:.3f}", f"{figures['ratio']:.2f}"
        )
    Console().print(table)
    rewards = result["rewards"]
    Console().print(
        f"samples per second: grpox {result['samples_per_second']['grpox']:.1f}, "
        f"TRL {result['samples_per_second']['trl']:.1f}, ratio {result['ratio_samples_per_second']:.2f}\n"
        f"mean reward of the last quarter: grpox {rewards['last_quarter']['grpox']:.3f}, "
        f"TRL {rewards['last_quarter']['trl']:.3f}; curves differ by "
        f"{rewards['mean_difference_at_equal_seeds']:.3f} on average"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="a recipe or run file (default: quickstart)")
    parser.add_argument("--model-path", help="model folder in place of the run file's")
    parser.add_argument("--generator", choices=["hf"], default="hf", help="what samples on both sides")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run (default: 30)")
    parser.add_argument("--warmup", type=int, default=2, help="first steps left out of the times (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, one seed each (default: 3)")
    parser.add_argument("--out", type=Path, help="also write the JSON object here")
    arguments = parser.parse_args()
    if Path(arguments.model).is_dir():
        parser.error("--model is a recipe or a run file; give a model's folder as --model-path")
    warmup = min(arguments.warmup, arguments.steps - 1)

    overrides = [f"train.max_steps={arguments.steps}", "evaluation=null", "tracking={}"]
    overrides += ["logging.completions_every=0", "logging.save_completions_every=0"]
    overrides += [f"generator={arguments.generator}"]
    if arguments.model_path:
        overrides.append(f"model.path={Path(arguments.model_path).absolute()}")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    runs: dict[str, list[dict[str, list[float]]]] = {side: [] for side in SIDES}
    for seed in range(arguments.repeats):
        # Whichever goes second finds a warmer machine: take turns at that too.
        for side in sorted(SIDES, reverse=bool(seed % 2)):
            runs[side].append(run_side(side, arguments.model, [*overrides, f"train.seed={seed}"]))
    batch = int(runs["grpox"][0]["samples"][0])
    result = {
        "benchmark": "vs_trl",
        "run": arguments.model,
        "generator": arguments.generator,
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "samples_per_step": batch,
        **compare(runs, warmup, batch),
        **surroundings(LIBRARIES),
    }
    show(result)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
