"""Peak memory of each phase of a short run, compared with `grpox plan --memory`.

On a GPU the peaks are those of torch's allocator: without the CUDA context and what the allocator reserves.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from memory_plan import GOAL, Point, Size, run_of
from memory_plan_point import LATER, MEASURED, NAMED, Watched, make_inputs, varied, watch_phases

from gpu_parts.part import Part
from grpox.policy.memory_plan.formula import PHASES, parts_of, size_in
from grpox.policy.memory_plan.of_run import run_setting
from grpox.runfile.load import resolve_config

PROMPT = 128
MIB = 2**20
POINTS = {
    "0.5B shape": Point(
        Size(896, 4864, 24, 14, vocabulary=151_936), dtype="bfloat16", sequences=8, completion=384
    ),
    "0.5B shape, recomputed": Point(
        Size(896, 4864, 24, 14, vocabulary=151_936),
        dtype="bfloat16",
        sequences=16,
        completion=896,
        checkpointing=True,
    ),
}
SMALL = {"tiny": Point(Size(64, 128, 2, 4, vocabulary=512), sequences=4, completion=8)}


class WatchedOnGpu(Watched):
    """The most that torch has allocated on the GPU in each phase."""

    def _watch(self) -> None:
        """Do nothing in the thread: the allocator itself knows its peak."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        around = self._phase
        self._note()
        if name == "load":
            gc.collect()  # what the run before has left would count as released by this one
            torch.cuda.empty_cache()
            self.before = torch.cuda.memory_allocated()
        self._phase = NAMED.get(name, around)
        try:
            yield
        finally:
            self._note()
            self._phase = around

    def _note(self) -> None:
        """Give the peak since the last turn to the phase at hand, and begin anew."""
        self.most[self._phase] = max(self.most[self._phase], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


def measure(part: Part) -> None:
    """Record MiB by the formula and measured, and `off`: the second over the first, less 1."""
    from grpox import train

    for module in LATER:
        importlib.import_module(module)
    watched = watch_phases(WatchedOnGpu if part.on_cuda else Watched)
    for name, point in (SMALL if part.small else POINTS).items():
        folder = part.folder / name.replace(" ", "-").replace(",", "")
        make_inputs(folder, asdict(point.size), PROMPT, point.sequences * 3)
        run = run_of(point, folder)
        part.attempt(
            name,
            lambda p=point, r=run: {"point": asdict(p)} | compared(part, watched, train, r, PROMPT),
        )
        off = part.figures[name].get("off")
        if off and not part.small:
            part.check(f"{name}: difference of the peak", abs(off["peak"]), GOAL)


def compared(
    part: Part, watched: Watched, train: Callable[..., Any], run: Mapping[str, Any], prompt: int
) -> dict[str, Any]:
    """Train, and compare the peaks of the run's phases; `prompt` is the length of the longest prompt.

    The peaks are recorded before an error goes on, so that one of too little memory says in which phase it was.
    """
    setting = run_setting(resolve_config(run, part.folder, "python"), gpu=part.on_cuda, prompt_tokens=prompt)
    parts = parts_of(setting)
    planned = {phase: size_in(parts, phase, on_host=not part.on_cuda) / MIB for phase in PHASES}
    watched.most.clear()
    try:
        train(run, rewards=[varied])
    finally:
        measured = {phase: (watched.most[phase] - watched.before) / MIB for phase in MEASURED}
        part.record("last", {"planned_mib": planned, "measured_mib": measured})
    off = {phase: measured[phase] / planned[phase] - 1 for phase in PHASES if planned[phase]}
    off["peak"] = max(measured.values()) / max(planned.values()) - 1
    return {"planned_mib": planned, "measured_mib": measured, "off": off}
