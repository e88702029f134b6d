"""Figures and verdict of one part, written to its file after each figure."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

OK, FAILED, SKIPPED, RUNNING = "ok", "failed", "skipped", "running"
BENCHMARKS = Path(__file__).parents[1]
GIB = 2**30


class Skipped(Exception):
    """The part cannot run here; the message is the reason."""


@dataclass
class Part:
    """One part while it runs."""

    device: torch.device
    small: bool
    """Tiny sizes: only shows that the part works."""
    folder: Path
    """Temporary files."""
    out: Path
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def record(self, name: str, value: Any) -> None:
        """Add a figure, and write all so far, failures too: a part that is ended later keeps them."""
        self.figures[name] = value
        self.write(RUNNING, "; ".join(self.failures))

    def attempt(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Record the figures of `measure`; an error becomes a failure of the part, which goes on.

        Too little memory is a figure and no failure: sizes are chosen so that some candidates reach the limit.
        """
        try:
            value = dict(measure())
        except torch.OutOfMemoryError as error:
            self._forget_memory()
            self.record(name, {"out_of_memory": str(error).splitlines()[0]})
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, the other figures count
            self.fail(f"{name}: {describe(error)}")
            self.record(name, {"error": describe(error)})
            return None
        self.record(name, value)
        return value

    def check(self, name: str, value: float, most: float) -> None:
        """Fail the part if `value` is above `most`, or is NaN."""
        if not value <= most:
            self.fail(f"{name} is {value:.3g}, more than {most:.3g}")

    def fail(self, reason: str) -> None:
        self.failures.append(reason)
        self.write(RUNNING, "; ".join(self.failures))

    def write(self, status: str, reason: str = "") -> None:
        """Write status, reason and figures to the part's file."""
        write_json(self.out, {"status": status, "reason": reason, **self.figures})

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], rounds: int = 5, warm_up: int = 2) -> float:
        """Return the median seconds of `function`, until the device is done."""
        times = []
        for _ in range(warm_up + rounds):
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[warm_up:])

    def peak_gib(self, function: Callable[[], Any]) -> float | None:
        """Return the GiB that `function` takes above those in use before; None without CUDA."""
        if not self.on_cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / GIB

    def run_script(self, script: str, *arguments: str) -> dict[str, Any]:
        """Run another benchmark and return its JSON object.

        Raises:
            RuntimeError: it failed; with the end of what it printed.
        """
        command = [sys.executable, str(BENCHMARKS / script), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{script} failed: {(done.stderr or done.stdout)[-2000:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def _forget_memory(self) -> None:
        if self.on_cuda:
            torch.cuda.empty_cache()


def describe(error: BaseException) -> str:
    """Return an error's class and text."""
    return f"{type(error).__name__}: {error}"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file at once: a reader sees the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||value - reference|| / ||reference||, computed on the reference's device and in its dtype."""
    reference = reference.detach()
    difference = value.detach().to(reference) - reference
    size = torch.linalg.vector_norm(reference, dtype=torch.float64)
    return float(torch.linalg.vector_norm(difference, dtype=torch.float64) / size.clamp_min(1e-300))


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors as one vector f64[N] on the host."""
    return torch.cat([tensor.detach().to("cpu", torch.float64).flatten() for tensor in tensors])
