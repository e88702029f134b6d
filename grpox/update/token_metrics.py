"""Metrics of a step: tokens' values reduced over micro-batches and ranks, and the time of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpox.runtime.world import World


@dataclass(frozen=True)
class _Part:
    """The reduced contribution of one micro-batch: K values of each of its N tokens."""

    count: int  # N
    sums: Tensor  # f64[K]
    least: Tensor  # f64[K]
    most: Tensor  # f64[K]

    @classmethod
    def of(cls, values: Tensor, spread: Tensor) -> _Part:
        """Reduce f64[K, N], with the extremes of f64[K, M]."""
        sums, count = values.sum(dim=1), values.shape[1]
        if count == 0:
            return cls(0, sums, torch.full_like(sums, torch.inf), torch.full_like(sums, -torch.inf))
        # aminmax would wake every thread, however little there is, and wait for those that are kept busy.
        return cls(count, sums, spread.amin(dim=1), spread.amax(dim=1))


class TokenMetrics:
    """Means and extremes of per-token values over one optimizer step, all ranks.

    Values that are measured together are added together, as one tensor. Every rank must add the same names,
    since their reduction is one collective.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, ...], list[_Part]] = defaultdict(list)

    def add(self, values: Mapping[str, Tensor], places: Tensor | None = None, of_means: bool = False) -> None:
        """Add values by name.

        Args:
            values: [B, T] each, or whatever shape they share.
            places: i64[N], those that count, of B * T; default: all.
            of_means: take extremes over the means of micro-batches, as TRL's low_min, high_max; default: over
                single tokens.
        """
        selected = select_values(values, places).double()
        spread = selected.mean(dim=1, keepdim=True) if of_means else selected
        self._parts[tuple(values)].append(_Part.of(selected, spread))

    def reduce(self, world: World) -> Tensor:
        """Reduce over all ranks, on the device: f64[2, n, 2] for `named`; a collective."""
        wholes = [_whole(self._parts[each]) for each in sorted(self._parts)]
        if not wholes:
            return torch.empty(2, 0, 2, dtype=torch.float64, device=world.device)
        sums = world.reduce(torch.cat([sums for sums, _ in wholes]), dist.ReduceOp.SUM)
        largest = world.reduce(torch.cat([ends for _, ends in wholes]), dist.ReduceOp.MAX)
        return torch.stack((sums, largest))

    def named(self, numbers: Tensor) -> dict[str, tuple[float, float, float]]:
        """name -> (mean, min, max) over all ranks; names for which no token counted are left out.

        Args:
            numbers: result of `reduce`, on the host.
        """
        return _merge([name for each in sorted(self._parts) for name in each], *numbers.tolist())


def read_together(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Copy tensors of a device to the host, as f64, for which the host waits once; None becomes f64[0]."""
    device = next(each.device for each in tensors if each is not None)
    known = [torch.empty(0, device=device) if each is None else each for each in tensors]
    together = torch.cat([each.double().flatten() for each in known]).cpu()
    parts = torch.split(together, [each.numel() for each in known])
    return [part.view(each.shape) for part, each in zip(parts, known, strict=True)]


Pair = Sequence[float]


def _merge(
    names: Sequence[str], sums: Sequence[Pair], extremes: Sequence[Pair]
) -> dict[str, tuple[float, float, float]]:
    """name -> (mean, min, max) from (sum, count) and (-min, max) of each of `names`."""
    totals: dict[str, tuple[float, float]] = {}
    ends: dict[str, tuple[float, float]] = {}
    for name, (total, count), (low, high) in zip(names, sums, extremes, strict=True):
        # A name can be among several that were added together, where a loss does not always tell the same.
        total_before, count_before = totals.get(name, (0.0, 0.0))
        totals[name] = total_before + total, count_before + count
        ends[name] = max(ends.get(name, (low, high))[0], low), max(ends.get(name, (low, high))[1], high)
    return {
        name: (total / count, -ends[name][0], ends[name][1]) for name, (total, count) in totals.items() if count
    }


def _whole(parts: Sequence[_Part]) -> tuple[Tensor, Tensor]:
    """All micro-batches of K names: f64[K, 2] of sum and count, and f64[K, 2] of -min and max."""
    sums = torch.stack([part.sums for part in parts]).sum(dim=0)
    least = torch.stack([part.least for part in parts]).amin(dim=0)
    most = torch.stack([part.most for part in parts]).amax(dim=0)
    counts = torch.full_like(sums, sum(part.count for part in parts))
    return torch.stack((sums, counts), dim=1), torch.stack((-least, most), dim=1)


def select_values(values: Mapping[str, Tensor], places: Tensor | None = None) -> Tensor:
    """f[K, N], the values [B, T] of each name at N places, i64[N] of B * T; default: at all."""
    together = torch.stack([each.detach() for each in values.values()]).flatten(1)
    return together if places is None else together.index_select(1, places)


def places_of(mask: Tensor) -> Tensor:
    """i64[N], where bool[B, T] is True, of B * T; on a GPU the host waits for the size of the result."""
    return mask.flatten().nonzero().squeeze(1)
