"""A generation batch that is sampled while the policy is updated, from its beginning until it is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from grpox.contracts import Rollout


class PrefetchedBatch:
    """This rank's part of it. It may be read more than once, though the generator's rollouts are read once."""

    def __init__(self, version: int, arriving: Iterable[Rollout]) -> None:
        """
        Args:
            version: optimizer steps of the weights that it was begun with.
            arriving: as a generator's `begin` returned it, perhaps short of samples.
        """
        self.version = version
        self._arriving = iter(arriving)
        self._came: list[Rollout] = []

    def __iter__(self) -> Iterator[Rollout]:
        """Each rollout as it comes, those first that have been read before.

        Raises:
            Exception: what went wrong with the sampling.
        """
        yield from self._came
        for rollout in self._arriving:
            self._came.append(rollout)
            yield rollout
