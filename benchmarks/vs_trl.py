"""grpox against TRL on the same work: samples per second, the time of each phase, and the reward curves.

    python benchmarks/vs_trl.py --model smollm2 --model-path FOLDER [--steps 4] [--out FILE.json] [a.b=c ...]
    python benchmarks/vs_trl.py --work recipe             the quickstart as it is: whether both learn alike
    python benchmarks/vs_trl.py --quick                   two steps of the quickstart's model

A bundled recipe (or any run file) says model, prompts, sampling and batch sizes; TRL is given the same, at its
best settings for one CPU process: plain PyTorch without DeepSpeed, no gradient checkpointing, no logging to a
tracker; --trl tries others. grpox runs on ZeRO-3 as it always does. The two take turns, each run in a process
of its own, and the first steps of each run are left out as warm-up.

    --work varied   completions are as long as in real runs (their mean is a third of the longest), and 60 % of
                    the groups have differing rewards. Both sides have the same prompts in the same order, and
                    row by row the same lengths: the last token is EOS, and none before is. The tokens between
                    are the model's own. What is learnt means nothing.
    --work recipe   the run file's own rewards, lengths as they come

With --generator vllm-colocate grpox samples with vLLM. TRL's own use of vLLM (--trl use_vllm=true --trl
vllm_mode=colocate) fails on vLLM's CPU build, which repacks the weights that TRL would set; so on a CPU its
best is transformers' generate. The last line is a JSON object with every figure.
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

from outcome import add_out, tell
from rich.console import Console
from rich.table import Table
from surroundings import surroundings
from varied_run import varied_overrides

LIBRARIES = ("grpox", "trl", "torch", "transformers", "deepspeed", "accelerate")
PHASES = ("generate", "reward", "update", "step")
SIDES = {"grpox": "vs_trl_grpox.py", "trl": "vs_trl_trl.py"}


Figures = dict[str, list[float]]
"""Figures of one run: phase -> seconds of each step; rewards, mean_length, uninformative -> value of each
step."""


def run_side(side: str, run: str, overrides: Sequence[str]) -> Figures:
    """One run of `side` in a process of its own."""
    script = Path(__file__).with_name(SIDES[side])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, str(script), str(out), run, *overrides, f"output_dir={folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
        figures: Figures = json.loads(out.read_text())
    return figures


def compare(runs: dict[str, list[Figures]], warmup: int, batch: int) -> dict[str, Any]:
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
        "completion_tokens_per_second": {side: tokens_per_second(runs[side], warmup, batch) for side in runs},
        "peak_gib": {side: max(run["peak_gib"][0] for run in runs[side]) for side in runs},
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


def tokens_per_second(repeats: list[Figures], warmup: int, batch: int) -> float:
    """Sampled and trained on, in whole steps."""
    return statistics.median(
        batch * sum(run["mean_length"][warmup:]) / sum(run["step"][warmup:]) for run in repeats
    )


def check_same_work(ours: Figures, theirs: Figures) -> None:
    """Varied work is the same on both sides, step by step, else the ratio would say something else."""
    for name in ("mean_length", "uninformative"):
        pairs = zip(ours[name], theirs[name], strict=True)
        if any(abs(one - other) > 1e-3 for one, other in pairs):
            sys.exit(f"{name} of the steps differs: grpox {ours[name]}, TRL {theirs[name]}")


def reward_difference(runs: dict[str, list[Figures]]) -> dict[str, Any]:
    """Measure the difference of the curves of mean reward at equal seeds, beside that of two seeds of one side.

    The two sides draw their samples from different random streams, so even identical algorithms differ.
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
    rewards, speed, peak = result["rewards"], result["samples_per_second"], result["peak_gib"]
    of_repeats = result["ratio_samples_per_second_of_repeats"]
    Console().print(
        f"samples per second: grpox {speed['grpox']:.2f}, TRL {speed['trl']:.2f}, ratio "
        f"{result['ratio_samples_per_second']:.2f} ({min(of_repeats):.2f} to {max(of_repeats):.2f})\n"
        f"peak memory: grpox {peak['grpox']:.2f} GiB, TRL {peak['trl']:.2f} GiB"
    )
    if result["work"] == "varied":
        return
    Console().print(
        f"mean reward of the last quarter: grpox {rewards['last_quarter']['grpox']:.3f}, "
        f"TRL {rewards['last_quarter']['trl']:.3f}; curves differ by "
        f"{rewards['mean_difference_at_equal_seeds']:.3f} on average"
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("override", nargs="*", help="a.b=c, of the run file, for both sides")
    parser.add_argument("--model", default="quickstart", help="a recipe or run file (default: quickstart)")
    parser.add_argument("--model-path", help="model folder in place of the run file's")
    parser.add_argument("--work", choices=["varied", "recipe"], default="varied", help="(default: varied)")
    parser.add_argument("--generator", default="hf", help="what samples for grpox (default: hf)")
    parser.add_argument("--trl", action="append", default=[], help="NAME=VALUE of TRL's GRPOConfig; repeatable")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run (default: 30, of smollm2 4)")
    parser.add_argument("--warmup", type=int, default=1, help="first steps left out of the times (default: 1)")
    parser.add_argument("--repeats", type=int, help="runs of each side, a seed each (default: 3, of smollm2 1)")
    parser.add_argument("--quick", action="store_true", help="one repeat of two steps")
    add_out(parser)
    arguments = parser.parse_args()
    if Path(arguments.model).is_dir():
        parser.error("--model is a recipe or a run file; give a model's folder as --model-path")
    small = arguments.model == "quickstart"
    arguments.steps = arguments.steps or (2 if arguments.quick else 30 if small else 4)
    arguments.repeats = arguments.repeats or (3 if small and not arguments.quick else 1)
    return arguments


def main() -> None:
    arguments = parsed()
    warmup = min(arguments.warmup, arguments.steps - 1)
    overrides = [f"train.max_steps={arguments.steps}", "evaluation=null", "tracking={}"]
    overrides += ["logging.completions_every=0", "logging.save_completions_every=0", "checkpoint.every=0"]
    overrides += ["train.warmup_steps=0", *arguments.override]
    if arguments.model_path:
        overrides.append(f"model.path={Path(arguments.model_path).absolute()}")
    own = {"grpox": [f"generator={arguments.generator}"], "trl": [f"trl.{given}" for given in arguments.trl]}
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    runs: dict[str, list[Figures]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.work == "varied":
            overrides += varied_overrides(arguments.model, overrides, Path(folder))
        for seed in range(arguments.repeats):
            # Whichever goes second finds a warmer machine: take turns at that too.
            for side in sorted(SIDES, reverse=bool(seed % 2)):
                told = [*overrides, f"train.seed={seed}", *own[side]]
                runs[side].append(run_side(side, arguments.model, told))
                step = statistics.median(runs[side][-1]["step"][warmup:])
                print(f"repeat {seed + 1}/{arguments.repeats}  {side:6} {step:8.3f} s a step", file=sys.stderr)
            if arguments.work == "varied":
                check_same_work(runs["grpox"][-1], runs["trl"][-1])
    batch = int(runs["grpox"][0]["samples"][0])
    result = {
        "benchmark": "vs_trl",
        "run": arguments.model,
        "work": arguments.work,
        "generator": arguments.generator,
        "trl": arguments.trl,
        "overrides": arguments.override,
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "samples_per_step": batch,
        **compare(runs, warmup, batch),
        **surroundings(LIBRARIES),
    }
    show(result)
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
