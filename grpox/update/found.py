"""Numbers of a step that are not finite: which term of the loss, and where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpox.errors.formatting import counted

TERMS = (
    "reference log-probability",
    "log-probability",
    "old log-probability",
    "entropy",
    "advantage",
    "correction R",
    "policy loss",
    "KL",
    "derivative",
)
"""What a loss is made of, causes before what they cause."""


@dataclass(frozen=True)
class Found:
    """The first number of a term that is not finite, on one rank. All places count from 0."""

    term: str
    value: str
    """``nan``, ``inf`` or ``-inf``."""
    rank: int
    micro_batch: int
    row: int
    """Of the micro-batch on this rank."""
    token: int
    """Of the completion."""
    count: int
    """Tokens of this rank for which the term is not finite."""

    def __str__(self) -> str:
        more = f" (and at {counted(self.count - 1, 'other token')})" if self.count > 1 else ""
        return f"{self.term} {self.value} at {self.where}{more}"

    @property
    def where(self) -> str:
        return f"rank {self.rank}, micro-batch {self.micro_batch}, row {self.row}, token {self.token}"


def find(micro_batches: Iterable[tuple[Mapping[str, Tensor], Tensor]], rank: int) -> list[Found]:
    """What is not finite in the micro-batches of a rank, one for each term, causes first.

    Args:
        micro_batches: terms (name -> f32[B, T]) and token mask bool[B, T] of each.
    """
    first: dict[str, Found] = {}
    for place, (terms, mask) in enumerate(micro_batches):
        for name, values in terms.items():
            bad = mask & ~torch.isfinite(values)
            count = int(bad.sum())
            if not count:
                continue
            row, token = bad.nonzero()[0].tolist()
            new = Found(name, str(values[row, token].item()), rank, place, row, token, 0)
            known = first.get(name, new)
            first[name] = replace(known, count=known.count + count)
    return in_order(list(first.values()))


def in_order(found: Sequence[Found]) -> list[Found]:
    """Causes first, and of one term the first rank."""
    return sorted(found, key=lambda each: (TERMS.index(each.term), each.rank))
