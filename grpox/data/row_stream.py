"""Rows of a streamed dataset by their position in the endless row of its epochs, a window at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from grpox.data.open_data import reason
from grpox.errors import ConfigError, RunFailed
from grpox.runtime.signals import raise_if_signal

if TYPE_CHECKING:
    import datasets

Row = Mapping[str, Any]

SHUFFLE_BUFFER = 10_000
"""Rows from which a shuffled stream draws the next one: its order is random over about this many rows."""


class RowStream:
    """An `IterableDataset`, read epoch after epoch; position p counts rows from the first of epoch 0.

    The order depends on the dataset and the seed alone, so every rank that reads it sees the same rows. What
    has been read is kept until `hold` asks for later rows.

    Args:
        dataset: its `set_epoch` is called, for an order of its own in each epoch.
        shuffle: draw rows from a buffer of `SHUFFLE_BUFFER`.
        seed: of the shuffle.

    Raises:
        ConfigError: it holds no row.
        RunFailed: it cannot be read.
    """

    def __init__(self, dataset: datasets.IterableDataset, shuffle: bool, seed: int) -> None:
        self._dataset = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER) if shuffle else dataset
        self.rows_per_epoch: int | None = None
        """Known once the first epoch has ended."""
        self._columns: tuple[str, ...] = ()
        self._rows: dict[int, Row] = {}
        self._start = self._read = 0
        self._stream = self._epochs()
        self.hold(range(1))

    def hold(self, positions: range) -> None:
        """Have the rows at `positions`, and forget those before them; rows already forgotten are read anew."""
        if positions.start < self._start:
            self._restart()
        for position in range(self._start, positions.start):
            self._rows.pop(position, None)
        while self._read < positions.stop:
            row = next(self._stream)
            if self._read >= positions.start:
                self._rows[self._read] = row
            self._read += 1
        self._start = positions.start

    def __getitem__(self, position: int) -> Row:
        """The row at `position`, which `hold` was asked for."""
        return self._rows[position]

    @property
    def rows_in_memory(self) -> int:
        """Rows in memory, apart from the shuffle's buffer."""
        return len(self._rows)

    @property
    def column_names(self) -> list[str]:
        """The dataset's columns, or those of the first row if the dataset does not know them."""
        return list(self._dataset.column_names or self._columns)

    def place(self, position: int) -> str:
        """Describe the row at `position` by its epoch."""
        size = self.rows_per_epoch
        if size is None or position < size:
            return f"row {position} (from 0) of the stream"
        return f"row {position % size} (from 0) of epoch {position // size} (from 0) of the stream"

    def _restart(self) -> None:
        self._rows.clear()
        self._start = self._read = 0
        self._stream = self._epochs()

    def _epochs(self) -> Iterator[Row]:
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
                raise ConfigError("the data holds no row", key="data")
            if epoch == 0:
                self.rows_per_epoch = count
            epoch += 1

    def _rows_of_epoch(self) -> Iterator[Row]:
        rows, last = iter(self._dataset), None
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except BaseException as error:
                raise_if_signal(error)
                read = f"after {self.place(self._read - 1)}" if self._read else "from its first row on"
                raise RunFailed(f"the data cannot be read {read}: {reason(error)}") from error
            if row is last:
                place = self.place(self._read)
                raise RunFailed(
                    f"the data gives the same dict object for {place} and for the row before it: what is "
                    "written into the one stands in both. It has to give a new dict for each row"
                )
            yield row
            last = row
