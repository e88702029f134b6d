"""Opens a .jsonl or .json file as a dataset whose rows have exactly the values in the file.

The reader of `datasets` gives each column one type: beside a number, "007" becomes 7, an integer beyond 64 bits
becomes a float, and an object gets the keys of other rows. This module therefore stores each value as JSON text
and parses the text when the value is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from grpox.data.json_rows import LOOKED_AT, Columns, Row, UnreadableData, json_rows

_STORED_AS = "JSON text by column, 1"
"""Part of the cache name in `datasets`; it must change when the storage format changes."""


def open_json(path: Path, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    """Open the rows of a file; a column that a row lacks is None in that row.

    Args:
        streaming: return an IterableDataset, with the columns of the file's first 32 MiB.

    Raises:
        UnreadableData: see `json_rows` and `Columns`; or no record has a column. Errors beyond the first part
            of a stream are raised when it is read.
    """
    columns = Columns()
    for place, row in json_rows(path, LOOKED_AT if streaming else None):
        columns.add(place, row)
    if not columns.names:
        raise UnreadableData("has no record with a column")
    given: dict[str, Any] = {"path": str(path), "names": columns.names}
    if streaming:
        return datasets.IterableDataset.from_generator(_streamed, gen_kwargs=given)
    about = path.stat()
    version = (str(path), about.st_size, about.st_mtime_ns, columns.names, _STORED_AS)
    rows = datasets.Dataset.from_generator(
        _stored,
        features=datasets.Features(dict.fromkeys(columns.names, datasets.Value("large_string"))),
        gen_kwargs=given,
        fingerprint=hashlib.sha256(repr(version).encode()).hexdigest()[:16],
    )
    return rows.with_transform(_parsed)


def _streamed(path: str, names: Sequence[str]) -> Iterator[Row]:
    columns = Columns(names)
    for place, row in json_rows(Path(path)):
        columns.add(place, row)
        yield {name: row.get(name) for name in names}


def _stored(path: str, names: Sequence[str]) -> Iterator[dict[str, str | None]]:
    for _, row in json_rows(Path(path)):
        yield {name: None if row.get(name) is None else json.dumps(row[name]) for name in names}


def _parsed(columns: dict[str, list[str | None]]) -> dict[str, list[Any]]:
    return {
        name: [None if text is None else json.loads(text) for text in texts] for name, texts in columns.items()
    }
