"""Metrics of a step: tokens' values reduced over micro-batches and ranks, and the time of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from grpox.runtime.world import World

_Part = tuple[int, Tensor, Tensor, Tensor]
"""A micro-batch of N tokens with K values each: N, their sums f64[K], least f64[K] and largest f64[K]."""


class TokenMetrics:
    """Means and extremes of per-token values over one optimizer step, all ranks.

    Values that are measured together are added together, as one tensor. Every rank must add the same names,
    since their reduction is one collective.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, ...], list[_Part]] = defaultdict(list)
        """Names that are added together -> a part of each micro-batch."""

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
        sums, count = selected.sum(dim=1), selected.shape[1]
        # aminmax would wake every thread, however little there is, and wait for those that are kept busy.
        ends = (spread.amin(dim=1), spread.amax(dim=1)) if count else (sums + torch.inf, sums - torch.inf)
        self._parts[tuple(values)].append((count, sums, *ends))

    def reduce(self, world: World) -> Tensor:
        """Reduce over all ranks, on the device: f64[2, n, 2] for `named`; a collective."""
        if not self._parts:
            return torch.empty(2, 0, 2, dtype=torch.float64, device=world.device)
        sums, ends = [], []
        for name in sorted(self._parts):
            counts, of_sums, of_least, of_most = zip(*self._parts[name], strict=True)
            total = torch.stack(of_sums).sum(dim=0)
            least, most = torch.stack(of_least).amin(dim=0), torch.stack(of_most).amax(dim=0)
            sums.append(torch.stack((total, torch.full_like(total, sum(counts))), dim=1))  # f64[K, 2]
            ends.append(torch.stack((-least, most), dim=1))
        added = world.reduce(torch.cat(sums), dist.ReduceOp.SUM)
        return torch.stack((added, world.reduce(torch.cat(ends), dist.ReduceOp.MAX)))

    def named(self, numbers: Tensor) -> dict[str, tuple[float, float, float]]:
        """name -> (mean, min, max) over all ranks; names for which no token counted are left out.

        Args:
            numbers: result of `reduce`, on the host.
        """
        totals: dict[str, tuple[float, float, float, float]] = {}
        names = [name for each in sorted(self._parts) for name in each]
        for name, (total, count), (low, high) in zip(names, *numbers.tolist(), strict=True):
            # A name can be among several that were added together, where a loss does not always tell the same.
            before = totals.get(name, (0.0, 0.0, low, high))
            totals[name] = before[0] + total, before[1] + count, max(before[2], low), max(before[3], high)
        return {
            name: (total / count, -low, high) for name, (total, count, low, high) in totals.items() if count
        }


def read_together(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Copy tensors of a device to the host, as f64, for which the host waits once; None becomes f64[0]."""
    device = next(each.device for each in tensors if each is not None)
    known = [torch.empty(0, device=device) if each is None else each for each in tensors]
    together = torch.cat([each.double().flatten() for each in known]).cpu()
    parts = torch.split(together, [each.numel() for each in known])
    return [part.view(each.shape) for part, each in zip(parts, known, strict=True)]


def select_values(values: Mapping[str, Tensor], places: Tensor | None = None) -> Tensor:
    """f[K, N], the values [B, T] of each name at N places, i64[N] of B * T; default: at all."""
    together = torch.stack([each.detach() for each in values.values()]).flatten(1)
    return together if places is None else together.index_select(1, places)


def places_of(mask: Tensor) -> Tensor:
    """i64[N], where bool[B, T] is True, of B * T; on a GPU the host waits for the size of the result."""
    return mask.flatten().nonzero().squeeze(1)
