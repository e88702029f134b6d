"""Opens data: a .jsonl, .json, .csv or .parquet file or a hub dataset, whole or as a stream."""

from __future__ import annotations

import errno
import glob
from pathlib import Path
from typing import TYPE_CHECKING

from grpox.data.json_rows import UnreadableData
from grpox.errors import ConfigError, Problem, chain, describe
from grpox.runtime import launch

if TYPE_CHECKING:
    import datasets

JSON = (".jsonl", ".json")
DATA_FILES = (*JSON, ".csv", ".parquet")
"""Suffixes of the files that can be opened."""

_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EEXIST}


def is_data_file(path: str) -> bool:
    """Return True for a resolved file path; a hub id stays relative."""
    return Path(path).is_absolute()


def open_data(
    path: str, subset: str | None = None, split: str = "train", streaming: bool = False, key: str = "data.path"
) -> datasets.Dataset | datasets.IterableDataset:
    """Open the rows of `path`, read as JSON or by `datasets`.

    Args:
        path: absolute path of a file, or a hub id ``org/name``.
        subset: configuration of a hub dataset.
        split: split in the notation of `datasets`: ``train``, ``train[:100]``. A file has one split, ``train``.
        streaming: return an IterableDataset, which reads rows on demand.
        key: key of the run file, named in the error.

    Raises:
        ConfigError: the dataset does not exist, cannot be reached or read, or its cache cannot be written.
    """
    import datasets

    if is_data_file(path) or launch.rank() > 0:
        datasets.disable_progress_bars()  # download bars stay, on one rank
    try:
        if is_data_file(path):
            return _open_file(Path(path), split, streaming)
        return datasets.load_dataset(path, subset, split=split, streaming=streaming)
    except UnreadableData as error:
        raise ConfigError(str(error), key=key, given=path) from error
    except Exception as error:
        given = ", ".join([path, *([f"subset {subset}"] if subset else []), f"split {split}"])
        raise ConfigError(_problem(error, key, given)) from error


def _open_file(path: Path, split: str, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    import datasets

    from grpox.data.json_dataset import open_json

    if path.suffix not in JSON:
        # Escaped, because datasets would read the path as a pattern.
        loader, files = path.suffix.removeprefix("."), glob.escape(str(path))
        return datasets.load_dataset(loader, data_files=files, split=split, streaming=streaming)
    rows = open_json(path, streaming)
    if isinstance(rows, datasets.IterableDataset) or split == "train":
        return rows
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    return rows.select([index for part in parts for index in range(part.from_, part.to)])


def _problem(error: Exception, key: str, given: str) -> Problem:
    import datasets

    first = list(chain(error))[-1]
    if isinstance(first, OSError) and first.errno in _UNWRITABLE:
        return Problem(
            f"datasets cannot write its cache: {first.strerror}: {first.filename}",
            key=key,
            given=f"cache {datasets.config.HF_DATASETS_CACHE}",
            allowed="a writable folder in HF_HOME or HF_DATASETS_CACHE",
        )
    return Problem(f"cannot be loaded: {reason(error)}", key=key, given=given)


def reason(error: BaseException) -> str:
    """Return type and message of the cause of `error`: the message of datasets itself is not informative."""
    return describe(list(chain(error))[-1])
