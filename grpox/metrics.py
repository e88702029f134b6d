"""Metrics of a step: tokens' values reduced over micro-batches and ranks, and the time of each phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from grpox.out_of_memory import memory_told
from grpox.world import World

WAITING = "gather"
"""The phase in which a rank waits for the others."""


class TokenMetrics:
    """Means and extremes of per-token values over one optimizer step, all ranks.

    Every rank must add the same names, since their reduction is one collective.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # name -> f64[2]: sum, count
        self._extremes: dict[str, Tensor] = {}  # name -> f64[2]: -min, max

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add values [B, T] where mask bool[B, T]; extremes are those of single tokens."""
        kept = values.detach().double()[mask]
        self._accumulate(name, kept, kept)

    def add_micro_batch(self, name: str, values: Tensor, mask: Tensor) -> None:
        """The same, with extremes over the micro-batches' means: what TRL calls low_min, high_max, ..."""
        kept = values.detach().double()[mask]
        self._accumulate(name, kept, kept.mean().reshape(1) if kept.numel() else kept)

    def _accumulate(self, name: str, values: Tensor, spread: Tensor) -> None:
        sums = torch.stack((values.sum(), values.new_tensor(values.numel())))
        self._sums[name] = self._sums.get(name, torch.zeros_like(sums)) + sums
        unset = values.new_full((1,), -torch.inf)
        extremes = torch.stack((torch.cat((-spread, unset)).max(), torch.cat((spread, unset)).max()))
        self._extremes[name] = torch.maximum(self._extremes.get(name, extremes), extremes)

    def reduce(self, world: World) -> dict[str, tuple[float, float, float]]:
        """name -> (mean, min, max) over all ranks; names for which no token counted are left out."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        sums = world.reduce(torch.stack([self._sums[name] for name in names]), dist.ReduceOp.SUM).tolist()
        extremes = world.reduce(
            torch.stack([self._extremes[name] for name in names]), dist.ReduceOp.MAX
        ).tolist()
        return {
            name: (total / count, -low, high)
            for name, (total, count), (low, high) in zip(names, sums, extremes, strict=True)
            if count
        }


@dataclass
class PhaseTimes:
    """Wall-clock seconds of each phase since the last `take`, and which phase it is now."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    failed: str = "none"
    """The phase in which the last exception was raised."""
    _error: BaseException | None = None
    _now: tuple[str, float] = field(default_factory=lambda: ("between phases", time.perf_counter()))
    """One tuple, so that another thread reads what belongs together."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, around = time.perf_counter(), self._now[0]
        self._now = name, start
        try:
            with memory_told(name):
                yield
        except BaseException as error:
            if error is not self._error:  # else it comes from a phase within this one
                self.failed, self._error = name, error
            raise
        finally:
            end = time.perf_counter()
            self.seconds[name] += end - start
            self._now = around, end

    def now(self) -> tuple[str, float]:
        """The phase under way, and when this or a phase within it last began or ended, by perf_counter."""
        return self._now

    def take(self) -> dict[str, float]:
        """The seconds of every phase as metrics ``time/<phase>``; counting starts over."""
        taken = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken
