"""Peak memory of an update beyond parameters, gradients and optimizer states, against vocabulary and length.

    python benchmarks/memory.py [--vocabularies 32768,65536,131072,262144] [--lengths 512,1024] [--rows 2]
                                [--dtype float32] [--out FILE.json]
    python benchmarks/memory.py --quick                   two vocabularies, one length

The model has a tiny body (2 layers, hidden size 64), so that the head decides. Each point is a process of its
own: after warm-up, by when all of that is there, it takes one optimizer step on --rows sequences, half of each
the completion, and one on a single sequence of two tokens.

What is told is the peak of the former minus that of the latter, in MiB, in the forward or in the backward pass,
whichever is more: parameters, gradients, optimizer states and buffers grow with the vocabulary as well, but are
the same in both, and so are subtracted by measurement. What is left are activations, logits and what is made of
them. The optimizer's step, which has a peak of its own that no batch changes, is in the JSON object. On CUDA
the peak is that of torch.cuda.max_memory_allocated, else that of resident memory (VmHWM, begun anew for each
phase).

    grpox    PolicyUpdate.step as a run takes it
    plain    log-softmax over the full logits, as the textbook has it, on the same engine

The last line is a JSON object with every figure.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from outcome import add_out, tell
from ranks import run_ranks
from rich.console import Console
from rich.table import Table
from surroundings import surroundings

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed")
SIDES = ("grpox", "plain")
VOCABULARIES, LENGTHS = "32768,65536,131072,262144", "512,1024"
PHASES = ("forward", "backward")
GOAL = 1.1
"""Largest over least peak of grpox at one length, whatever the vocabulary."""
MIB = 2**20
ALLOCATOR = {
    # Whatever is large is given back to the system when it is freed, so that residence is what is held.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


def point(side: str, vocabulary: int, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one process, in MiB."""
    given = {"side": side, "vocabulary": vocabulary, "length": length}
    given |= {"rows": arguments.rows, "dtype": arguments.dtype}
    (found,) = run_ranks("memory_point.py", given, 1, os.environ | ALLOCATOR)
    whole, single = found["whole"], found["single"]
    beyond = max(whole[phase] - single[phase] for phase in PHASES) / MIB
    print(f"{side:6} vocabulary {vocabulary:7,}  length {length:5}  {beyond:9.1f} MiB", file=sys.stderr)
    return {
        "side": side,
        "vocabulary": vocabulary,
        "length": length,
        "beyond_mib": beyond,
        "parameters_mib": found["parameters"] * (2 if arguments.dtype == "bfloat16" else 4) / MIB,
        "peaks_mib": {phase: whole[phase] / MIB for phase in PHASES},
        "of_a_single_sequence_mib": {phase: single[phase] / MIB for phase in PHASES},
        "optimizer_step_mib": whole["optimizer_step"] / MIB,
        "held_before_mib": whole["held"] / MIB,
    }


def summary(points: list[dict[str, Any]]) -> dict[str, Any]:
    """For each length: how much more the largest vocabulary takes than the smallest, and plain over grpox."""
    found = {(p["side"], p["length"], p["vocabulary"]): p["beyond_mib"] for p in points}
    result = {}
    for length in sorted({p["length"] for p in points}):
        vocabularies = sorted({p["vocabulary"] for p in points})
        peaks = {side: [found[side, length, v] for v in vocabularies] for side in SIDES}
        result[str(length)] = {
            "largest_over_least_vocabulary": {side: peaks[side][-1] / peaks[side][0] for side in SIDES},
            "most_over_least": {side: max(peaks[side]) / min(peaks[side]) for side in SIDES},
            "plain_over_grpox": [p / g for p, g in zip(peaks["plain"], peaks["grpox"], strict=True)],
        }
    return result


def show(result: dict[str, Any]) -> None:
    found = {(p["side"], p["length"], p["vocabulary"]): p["beyond_mib"] for p in result["points"]}
    vocabularies = sorted({p["vocabulary"] for p in result["points"]})
    title = f"{result['rows']} sequences: MiB beyond parameters, gradients, optimizer states"
    table = Table("tokens", "", *(f"{v:,}" for v in vocabularies), "last / first", title=title)
    for length, own in result["lengths"].items():
        for side in SIDES:
            cells = [f"{found[side, int(length), v]:.1f}" for v in vocabularies]
            table.add_row(length, side, *cells, f"{own['largest_over_least_vocabulary'][side]:.2f}")
    Console().print(table)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocabularies", default=VOCABULARIES, type=numbers, help="(default: %(default)s)")
    parser.add_argument("--lengths", default=LENGTHS, type=numbers, help="of a sequence (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=2, help="sequences of the update (default: 2)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--quick", action="store_true", help="vocabularies 32768 and 131072, length 512")
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.vocabularies, arguments.lengths = [32768, 131072], [512]
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    points = [
        point(side, vocabulary, length, arguments)
        for length in arguments.lengths
        for vocabulary in arguments.vocabularies
        for side in SIDES
    ]
    result = {
        "benchmark": "memory",
        "rows": arguments.rows,
        "dtype": arguments.dtype,
        "lengths": summary(points),
        "points": points,
        "goal_most_over_least": GOAL,
        **surroundings(LIBRARIES),
    }
    show(result)
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
