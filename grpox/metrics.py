"""Metrics of a step: tokens' values reduced over micro-batches and ranks, and the time of each phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
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

    Values that are measured together are added together, as one tensor. Every rank must add the same names,
    since their reduction is one collective.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}  # K names -> f64[K, 2]: sum, count
        self._extremes: dict[tuple[str, ...], Tensor] = {}  # K names -> f64[K, 2]: -min, max

    def add(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add values [B, T] by name where mask bool[B, T]; extremes are those of single tokens."""
        kept = _kept(values, mask)
        self._accumulate(tuple(values), kept, kept)

    def add_micro_batch(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """The same, with extremes over the micro-batches' means: what TRL calls low_min, high_max, ..."""
        kept = _kept(values, mask)
        self._accumulate(tuple(values), kept, kept.mean(dim=1, keepdim=True) if kept.shape[1] else kept)

    def _accumulate(self, names: tuple[str, ...], values: Tensor, spread: Tensor) -> None:
        sums = torch.stack((values.sum(dim=1), values.new_full((len(names),), values.shape[1])), dim=1)
        if spread.shape[1]:
            # aminmax would wake every thread, however little there is, and wait for those that are kept busy.
            extremes = torch.stack((-spread.amin(dim=1), spread.amax(dim=1)), dim=1)
        else:
            extremes = values.new_full((len(names), 2), -torch.inf)
        if names in self._sums:
            sums = self._sums[names] + sums
            extremes = torch.maximum(self._extremes[names], extremes)
        self._sums[names], self._extremes[names] = sums, extremes

    def reduce(self, world: World) -> dict[str, tuple[float, float, float]]:
        """name -> (mean, min, max) over all ranks; names for which no token counted are left out."""
        if not self._sums:
            return {}
        together = sorted(self._sums)
        names = [name for each in together for name in each]
        sums = world.reduce(torch.cat([self._sums[each] for each in together]), dist.ReduceOp.SUM)
        extremes = world.reduce(torch.cat([self._extremes[each] for each in together]), dist.ReduceOp.MAX)
        totals: dict[str, tuple[float, float]] = {}
        ends: dict[str, tuple[float, float]] = {}
        for name, (total, count), (low, high) in zip(names, sums.tolist(), extremes.tolist(), strict=True):
            # A name can be among several that were added together, where a loss does not always tell the same.
            total_before, count_before = totals.get(name, (0.0, 0.0))
            totals[name] = total_before + total, count_before + count
            ends[name] = max(ends.get(name, (low, high))[0], low), max(ends.get(name, (low, high))[1], high)
        return {
            name: (total / count, -ends[name][0], ends[name][1])
            for name, (total, count) in totals.items()
            if count
        }


def _kept(values: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """f64[K, N], the values [B, T] of each name at the N places in the mask."""
    places = mask.flatten().nonzero().squeeze(1)
    return torch.stack([each.detach() for each in values.values()]).flatten(1).index_select(1, places).double()


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
