"""Prompts of a run whose generation batches draw as many as they turn out to need."""

from __future__ import annotations

from grpox.data.schedule import PromptSampler, StreamSampler


class PromptCursor:
    """The next prompts of the seeded order, as many as are asked for.

    As long as no batch takes more, they are those of the schedule: a batch begins in the epoch that it ends
    in, and what is left of an epoch is dropped. Further prompts of a batch go on over the end of an epoch.
    Where the run is in the order is its only state, and the same on every rank.
    """

    def __init__(self, sampler: PromptSampler | StreamSampler) -> None:
        self._sampler = sampler
        self._position = 0
        self._batch = 0

    @property
    def position(self) -> int:
        """Prompts drawn so far, over all epochs; a checkpoint holds this number."""
        return self._position

    @property
    def epoch(self) -> float:
        """Passes over the prompts so far."""
        return self._position / self._sampler.prompts_per_epoch

    def restore(self, position: int) -> None:
        """Go on from `position`; a stream is read up to there."""
        self._position = position
        if position:
            self._sampler.prompts_at(range(position - 1, position))

    def batch(self) -> list[int]:
        """Dataset indices of the unique prompts that the next generation batch begins with."""
        self._position = self._batch = self._sampler.batch_at(self._position)
        return self.more(self._sampler.prompts_per_generation)

    def more(self, count: int) -> list[int]:
        """Dataset indices of `count` further prompts for that batch."""
        first, self._position = self._position, self._position + count
        return self._sampler.prompts_at(range(first, self._position), keep_from=self._batch)
