"""Steps whose loss or gradient is not finite: the run ends, or goes on without them.

Which term of the loss it was, and where, is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from grpox.config import TrainConfig
from grpox.errors import RunFailed
from grpox.errors.formatting import counted
from grpox.errors.warn_once import TellOnce
from grpox.runtime.world import World

if TYPE_CHECKING:
    from grpox.update.micro_batch import Slice


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
"""Terms of a loss, causes before what they cause."""


@dataclass(frozen=True)
class Found:
    """The first number of a term that is not finite, on one rank. All places count from 0."""

    term: str
    value: str
    """``nan``, ``inf`` or ``-inf``."""
    rank: int
    micro_batch: int
    row: int
    """Row of the micro-batch on this rank."""
    token: int
    """Position in the completion."""
    count: int
    """Tokens of this rank for which the term is not finite."""

    def __str__(self) -> str:
        more = f" (and at {counted(self.count - 1, 'other token')})" if self.count > 1 else ""
        return f"{self.term} {self.value} at {self.where}{more}"

    @property
    def where(self) -> str:
        return f"rank {self.rank}, micro-batch {self.micro_batch}, row {self.row}, token {self.token}"


def find(micro_batches: Iterable[tuple[Mapping[str, Tensor], Tensor]], rank: int) -> list[Found]:
    """Return the first number that is not finite of each term in a rank's micro-batches, causes first.

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


TOLD = 4
"""Terms that a message names."""


class FaultDumps(Protocol):
    """Keeps the batch of a step that was not taken, as `grpox.checkpoint.faults.dump.FaultDumps` does."""

    def dump(self, step: int, what: str, found: Sequence[Found], slices: Sequence[Slice]) -> str:
        """Keep the batch and return a line that tells where it is; a collective."""
        ...


@dataclass
class NonFinitePolicy:
    """Counts the steps that were not taken, keeps their batches, and ends the run where it should."""

    config: TrainConfig
    world: World
    dumps: FaultDumps | None = None
    """Keeps the batches; None: none are kept."""
    warn: TellOnce = field(default_factory=TellOnce)
    skipped: int = 0
    """Steps of the run that were skipped."""
    in_a_row: int = 0
    """The last of these, without a step between them that was taken."""

    def taken(self) -> None:
        """A step was taken."""
        self.in_a_row = 0

    def metrics(self) -> dict[str, float]:
        """Return the number of steps skipped so far, in a run that may skip any."""
        return {"skipped_steps": float(self.skipped)} if self.config.on_nonfinite == "skip" else {}

    def not_taken(
        self, step: int, what: str, slices: Sequence[Slice], terms: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """A step was not taken; a collective.

        Args:
            step: its number.
            what: one line: what was not finite.
            slices: this rank's micro-batches, as they were before the step.
            terms: of each what its loss was made of; see `grpox.update.forward.terms_of`.

        Raises:
            RunFailed: the run should end.
        """
        masks = [slice_.batch.token_mask for slice_ in slices]
        mine = find(zip(terms, masks, strict=True), self.world.rank)
        found = in_order(self.world.gather(mine))
        self.skipped += 1
        self.in_a_row += 1
        told = f"{what} in step {step}{_where(found)}"
        if self.dumps is not None:
            told += f"\n    {self.dumps.dump(step, what, found, slices)}"
        if self.config.on_nonfinite == "stop":
            hint = "train.on_nonfinite=skip goes on without such steps"
            raise RunFailed(f"{told}\n    no weight was changed; {hint} (docs/numerical-faults.md)")
        if self.in_a_row >= self.config.max_skips_in_a_row:
            row = f"{counted(self.in_a_row, 'step')} in a row"
            raise RunFailed(f"{told}\n    the run ends: {row} were not taken (train.max_skips_in_a_row)")
        if self.world.is_main:
            self.warn(f"skipped {step}", f"{told}\n    the step is skipped, as train.on_nonfinite says")


def _where(found: Sequence[Found]) -> str:
    """The first number of each term, the causes first."""
    if not found:
        return ": the loss and its derivatives are finite, the backward pass of the model is not"
    first = list({each.term: each for each in reversed(found)}.values())[::-1]
    return ": " + "; ".join(str(each) for each in first[:TOLD])
