"""Memory that `grpox plan --memory` predicts, compared with the memory of real runs on the CPU.

    python benchmarks/memory_plan.py [--out FILE.json]
    python benchmarks/memory_plan.py --quick              one model, on two ranks

Each point is a separate run of three steps. Every 5 ms a thread of each rank reads the process's own memory
(resident, without mapped files) and records the maximum of each phase. The memory of libraries before the model
is loaded is subtracted. The allocator returns freed memory at once, which excludes fragmentation, because no
formula predicts it; --usual-allocator includes it.

    load        loading and sharding the model
    generate    weights to the copy that generates, and sampling
    update      forward and backward
    reduce      gradients summed over the ranks, after them
    step        the optimizer's step

The last line is a JSON object with every figure.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outcome import add_out, tell
from ranks import run_ranks
from rich.console import Console
from rich.table import Table
from surroundings import surroundings

from grpox.policy.memory_plan.formula import PHASES, parts_of, size_in
from grpox.policy.memory_plan.of_run import run_setting
from grpox.runfile.load import resolve_config

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed")
MIB = 2**20
GOAL = 0.15
"""The largest difference of the peak from the formula's, as a part of it."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Whatever is large is given back to the system when it is freed."""
PROMPT = 24


@dataclass(frozen=True)
class Size:
    """A Llama whose key heads are shared by two query heads each."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int = 8192
    tied: bool = True


@dataclass(frozen=True)
class Point:
    """One run."""

    size: Size
    ranks: int = 1
    offload: bool = False
    checkpointing: bool = False
    dtype: str = "float32"
    sequences: int = 8
    completion: int = 40


SMALL, MIDDLE, LARGE = (
    Size(256, 1024, 8, 8),
    Size(512, 2048, 10, 8),
    Size(768, 3072, 12, 12, tied=False),
)
LONG = {"sequences": 16, "completion": 96}
"""So much that activations are most of what a small model takes."""
QUICK = [Point(MIDDLE, ranks=2)]
POINTS = [
    Point(MIDDLE),
    *QUICK,
    Point(MIDDLE, offload=True),
    Point(MIDDLE, ranks=2, offload=True),
    Point(LARGE),
    Point(SMALL, **LONG),
    Point(SMALL, checkpointing=True, **LONG),
    Point(LARGE, ranks=2),
]


def run_of(point: Point, folder: Path) -> dict[str, Any]:
    """The run file of a point, less its rewards and data."""
    return {
        "model": {"path": str(folder), "dtype": point.dtype},
        "data": {"path": str(folder / "prompts.jsonl")},
        "rewards": ["exact"],
        "advantage": "none",
        "train": {
            "max_steps": 3,
            "per_device_train_batch_size": point.sequences,
            "num_generations": point.sequences,
            "gradient_checkpointing": point.checkpointing,
            "prefix_sharing": False,
            "learning_rate": 1e-5,
        },
        "sampling": {"max_completion_length": point.completion, "min_completion_length": point.completion},
        "deepspeed": {"offload_optimizer": "cpu" if point.offload else "none"},
        "checkpoint": {"every": 0},
        "tracking": {},
        "output_dir": str(folder / "run"),
    }


def describe_training(point: Point, folder: Path) -> dict[str, float]:
    """The formula's peaks, in MiB."""
    run = resolve_config(run_of(point, folder), folder, "python", world_size=point.ranks)
    parts = parts_of(run_setting(run, gpu=False, prompt_tokens=PROMPT))
    return {phase: size_in(parts, phase, on_host=True) / MIB for phase in PHASES}


def measured(point: Point, folder: Path, usual_allocator: bool) -> list[dict[str, float]]:
    """The peaks of each rank, in MiB above what was there before."""
    environment = dict(os.environ) if usual_allocator else os.environ | ALLOCATOR
    given = {"run": run_of(point, folder), "folder": str(folder), "size": asdict(point.size), "prompt": PROMPT}
    return run_ranks("memory_plan_point.py", given, point.ranks, environment)


def compared(point: Point, usual_allocator: bool) -> dict[str, Any]:
    """Figures of a point; `off` is measured over told, less 1, for the peak of all phases and for each."""
    from memory_plan_point import make_inputs

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, asdict(point.size), PROMPT, point.sequences * point.ranks * 3)
        told = describe_training(point, folder)
        ranks = measured(point, folder, usual_allocator)
    found = {phase: max(rank[phase] for rank in ranks) for phase in PHASES}
    off = {phase: found[phase] / told[phase] - 1 for phase in PHASES}
    off["peak"] = max(found.values()) / max(told.values()) - 1
    print(f"{point}: told {told}, found {found}, off {off}", file=sys.stderr)
    return {
        "point": asdict(point),
        "told_mib": told,
        "found_mib": found,
        "off": off,
        "before_mib": ranks[0]["before"],
    }


def show(points: list[dict[str, Any]]) -> None:
    table = Table("model", "ranks", "offload", "told", "found", "off", "of load", *PHASES[1:])
    for found in points:
        point, off = found["point"], found["off"]
        size = point["size"]
        table.add_row(
            f"{size['hidden']} x {size['layers']}, {point['dtype']}"
            + (", checkpointing" if point["checkpointing"] else ""),
            str(point["ranks"]),
            "cpu" if point["offload"] else "",
            f"{max(found['told_mib'].values()):,.0f} MiB",
            f"{max(found['found_mib'].values()):,.0f} MiB",
            *(f"{off[name]:+.0%}" for name in ("peak", *PHASES)),
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the middle one alone, on two ranks")
    parser.add_argument("--usual-allocator", action="store_true", help="fragmentation included")
    add_out(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    points = [compared(point, arguments.usual_allocator) for point in (QUICK if arguments.quick else POINTS)]
    result = {
        "benchmark": "memory_plan",
        "allocator": "usual" if arguments.usual_allocator else "gives back what is freed",
        "points": points,
        "largest_off": max(abs(found["off"]["peak"]) for found in points),
        "goal": GOAL,
        **surroundings(LIBRARIES),
    }
    show(points)
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
