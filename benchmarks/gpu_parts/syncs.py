"""Lines at which the host waits for the device during an optimizer step.

torch warns at each operation that synchronises. The stack then tells two lines: the innermost of grpox or a
plugin, and the innermost of all. As in host_syncs.py, a wait is not grpox's if a line of DeepSpeed, of
transformers or the like lies between, and the limits are the same.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from host_syncs import MICRO_BATCH_LIMIT, STEP_LIMIT
from sync_counter import OTHERS

import grpox
from gpu_parts.models import QWEN_05B, TINY
from gpu_parts.part import Part, Skipped
from gpu_parts.steps import Candidate, config_of, micro_batches
from grpox.runtime.setup import quieten
from grpox.runtime.world import start_world

PASSES = 4
MARK = "synchronizing CUDA operation"
"""In torch's warning."""
HERE = Path(__file__).parents[1]
PROJECT = ("grpox", "grpox_losses", "grpox_corrections", "grpox_generators", "grpox_advantages")


class Place(NamedTuple):
    """A line that waited."""

    of_project: str
    """Innermost line of grpox or a plugin; empty if a library's is the inner one."""
    innermost: str


def measure(part: Part) -> None:
    """Record the lines with their counts, those of the project first, and waits a pass and a step."""
    quieten()
    world, shape = start_world(), TINY if part.small else QWEN_05B
    rows, prompt, completion = (2, 4, 12) if part.small else (8, 256, 768)
    tokens = rows * (prompt + completion)
    config = config_of(rows, completion, tokens, "float32" if part.small else "bfloat16")
    candidate = Candidate("grpox", shape, config, world)
    step = candidate.step_of(config)
    counts = {}
    for passes in (1, PASSES):
        batches = micro_batches(passes, rows, prompt, completion, shape.vocabulary, world.device)
        for _ in range(2):
            step(batches)
        with collected() as found:
            step(batches)
        counts[passes] = found
    candidate.engine.close()
    part.record("mode", candidate.mode)
    part.record("lines", listed(counts[PASSES]))
    for name, ours in (("grpox", True), ("others", False)):
        one, many = (
            sum(count for place, count in counts[passes].items() if bool(place.of_project) is ours)
            for passes in (1, PASSES)
        )
        per_pass = (many - one) / (PASSES - 1)
        part.record(name, {"per_micro_batch": per_pass, "per_step": one - per_pass})
    part.check("waits of grpox in a micro-batch", part.figures["grpox"]["per_micro_batch"], MICRO_BATCH_LIMIT)
    part.check("waits of grpox in a step", part.figures["grpox"]["per_step"], STEP_LIMIT)
    if not part.on_cuda:
        raise Skipped("only CUDA tells where the host waits; the steps were taken without counting")


@contextmanager
def collected() -> Iterator[Counter[Place]]:
    """Count the places that synchronise within the block; without CUDA only warnings of such a text."""
    found: Counter[Place] = Counter()

    def note(message: Any, category: Any, filename: str, line: int, *_: Any, **__: Any) -> None:
        if MARK in str(message):
            found[place_of(sys._getframe(1), filename, line)] += 1

    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else None
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            if mode is not None:
                torch.cuda.set_sync_debug_mode("warn")
            yield found
        finally:
            if mode is not None:
                torch.cuda.set_sync_debug_mode(mode)


def place_of(frame: FrameType | None, filename: str, line: int) -> Place:
    """Find the innermost line of the project on the stack; `filename` and `line` are where torch warned."""
    while frame is not None and not any(each in frame.f_code.co_filename for each in OTHERS):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in PROJECT:
            own = short(frame.f_code.co_filename)
            return Place(f"{own}:{frame.f_lineno}", f"{short(filename)}:{line}")
        frame = frame.f_back
    return Place("", f"{short(filename)}:{line}")


def short(filename: str) -> str:
    """Shorten a path: relative to the folder that holds grpox or the installed packages."""
    path = Path(filename)
    for root in (Path(grpox.__file__).parents[1], HERE.parent, Path(torch.__file__).parents[1]):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return filename


def listed(found: Counter[Place]) -> list[dict[str, Any]]:
    order = sorted(found.items(), key=lambda item: (not item[0].of_project, -item[1]))
    return [
        {"at": place.of_project or None, "innermost": place.innermost, "count": count} for place, count in order
    ]
