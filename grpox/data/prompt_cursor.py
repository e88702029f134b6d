"""Prompts of a run with dynamic sampling, whose generation batches draw any number of prompts."""

from __future__ import annotations

from grpox.data.schedule import PromptSampler, StreamSampler


class PromptCursor:
    """Draws any number of next prompts of the seeded order.

    If no batch draws extra prompts, the prompts equal the schedule's: a batch lies within one epoch, and the
    rest of an epoch is dropped. Extra prompts of a batch may continue in the next epoch. The only state is the
    position in the order, which is the same on every rank.
    """

    def __init__(self, sampler: PromptSampler | StreamSampler) -> None:
        self._sampler = sampler
        self._position = 0
        self._batch = 0

    @property
    def position(self) -> int:
        """Number of prompts drawn so far over all epochs; checkpoints save it."""
        return self._position

    @property
    def epoch(self) -> float:
        """Number of passes over the prompts so far."""
        return self._position / self._sampler.prompts_per_epoch

    def restore(self, position: int) -> None:
        """Continue from `position`; a stream is read up to there."""
        self._position = position
        if position:
            self._sampler.prompts_at(range(position - 1, position))

    def batch(self) -> list[int]:
        """Return dataset indices of the first prompts of the next generation batch."""
        self._position = self._batch = self._sampler.batch_at(self._position)
        return self.more(self._sampler.prompts_per_generation)

    def more(self, count: int) -> list[int]:
        """Return dataset indices of `count` extra prompts for the same batch."""
        first, self._position = self._position, self._position + count
        return self._sampler.prompts_at(range(first, self._position), keep_from=self._batch)
