"""Rows of a streamed dataset by position over all epochs, with a window of rows in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from grpox.data.open_data import reason
from grpox.errors import ConfigError, RunFailed
from grpox.runtime.signals import raise_if_signal

if TYPE_CHECKING:
    import datasets

SHUFFLE_BUFFER = 10_000
"""Number of rows from which a shuffled stream draws the next one; the order is random over about as many."""


class RowStream:
    """An `IterableDataset`, read epoch after epoch; position p counts rows from the first of epoch 0.

    The order depends only on the dataset and the seed, so every rank sees the same rows. Rows stay in memory
    until `hold` asks for later ones.

    Args:
        dataset: its `set_epoch` is called, so that each epoch has a different order.
        shuffle: draw rows from a buffer of `SHUFFLE_BUFFER` rows.
        seed: seed of the shuffle.

    Raises:
        ConfigError: the dataset has no row.
        RunFailed: the dataset cannot be read.
    """

    def __init__(self, dataset: datasets.IterableDataset, shuffle: bool, seed: int) -> None:
        self._dataset = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER) if shuffle else dataset
        self.rows_per_epoch: int | None = None
        """Number of rows in an epoch; None until the first epoch has ended."""
        self._columns: tuple[str, ...] = ()
        self._rows: dict[int, Mapping[str, Any]] = {}
        self._start = self._read = 0
        self._stream = self._epochs()
        self.hold(range(1))

    def hold(self, positions: range) -> None:
        """Load the rows at `positions` and drop earlier ones; a row dropped before is read again."""
        if positions.start < self._start:
            self._rows.clear()
            self._start = self._read = 0
            self._stream = self._epochs()
        for position in range(self._start, positions.start):
            self._rows.pop(position, None)
        while self._read < positions.stop:
            row = next(self._stream)
            if self._read >= positions.start:
                self._rows[self._read] = row
            self._read += 1
        self._start = positions.start

    def __getitem__(self, position: int) -> Mapping[str, Any]:
        """Return the row at `position`, loaded by `hold`."""
        return self._rows[position]

    @property
    def column_names(self) -> list[str]:
        """Columns of the dataset, or of its first row if the dataset does not know them."""
        return list(self._dataset.column_names or self._columns)

    def place(self, position: int) -> str:
        """Describe the row at `position` by its epoch."""
        size = self.rows_per_epoch
        if size is None or position < size:
            return f"row {position} (from 0) of the stream"
        return f"row {position % size} (from 0) of epoch {position // size} (from 0) of the stream"

    def _epochs(self) -> Iterator[Mapping[str, Any]]:
        epoch = 0
        while True:
            self._dataset.set_epoch(epoch)
            count = 0
            for row in self._rows_of_epoch():
                if epoch == count == 0:
                    self._columns = tuple(row)
                count += 1
                yield row
            if count == 0:
                raise ConfigError("the data has no row", key="data")
            if epoch == 0:
                self.rows_per_epoch = count
            epoch += 1

    def _rows_of_epoch(self) -> Iterator[Mapping[str, Any]]:
        rows, last = iter(self._dataset), None
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except BaseException as error:
                raise_if_signal(error)
                read = f"after {self.place(self._read - 1)}" if self._read else "from its first row"
                raise RunFailed(f"the data cannot be read {read}: {reason(error)}") from error
            if row is last:
                place = self.place(self._read)
                raise RunFailed(
                    f"the data must yield a new dict for each row: {place} is the same object as the row "
                    "before, so a change to one row changes the other"
                )
            yield row
            last = row
