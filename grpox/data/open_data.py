"""Opens data: a .jsonl, .json, .csv or .parquet file or a hub dataset, whole or as a stream."""

from __future__ import annotations

import errno
import glob
from pathlib import Path
from typing import TYPE_CHECKING

from grpox.data.json_rows import UnreadableData, open_json
from grpox.errors import ConfigError, Problem, chain, describe, nearest
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
        # datasets raises a ValueError for what a dataset lacks that it has found.
        lacks = isinstance(error, ValueError) and not is_data_file(path)
        if lacks and (problem := _missing_part(path, subset, split, key)) is not None:
            raise ConfigError(problem) from error
        given = ", ".join([path, *([f"subset {subset}"] if subset else []), f"split {split}"])
        raise ConfigError(_problem(error, key, given)) from error


def _missing_part(path: str, subset: str | None, split: str, key: str) -> Problem | None:
    """Find a subset or split that a hub dataset lacks, or a subset that it needs; None without either."""
    import datasets

    section = key.removesuffix("path")
    try:
        subsets = datasets.get_dataset_config_names(path)
        chosen = subset or datasets.get_dataset_default_config_name(path)
        if chosen not in subsets:
            what = f"no such subset of {path}" if subset else f"{path} has several subsets, and none by default"
            allowed, near = ", ".join(subsets), nearest(subset or "", subsets)
            return Problem(what, f"{section}subset", given=subset or "", allowed=allowed, nearest=near)
        splits = datasets.get_dataset_split_names(path, chosen)
    except Exception:  # noqa: BLE001 - the dataset cannot be read at all: the caller reports why
        return None
    for part in split.split("+"):
        name, _, _ = part.strip().partition("[")
        if name not in splits:
            what, near = f"no such split of {path}", nearest(name, splits)
            return Problem(what, f"{section}split", given=split, allowed=", ".join(splits), nearest=near)
    return None


def _open_file(path: Path, split: str, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    import datasets

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
