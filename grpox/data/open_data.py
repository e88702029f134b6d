"""Opens data: a .jsonl, .json, .csv or .parquet file, or a dataset of the hub, whole or as a stream."""

from __future__ import annotations

import errno
import glob
from pathlib import Path
from typing import TYPE_CHECKING

from grpox import launch
from grpox.errors import ConfigError, Problem, text_of

if TYPE_CHECKING:
    import datasets

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}

_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EEXIST}


def is_data_file(path: str) -> bool:
    """Whether `path`, which a run has resolved, is a file and not a hub id; those stay relative."""
    return Path(path).is_absolute()


def open_data(
    path: str, subset: str | None = None, split: str = "train", streaming: bool = False, key: str = "data.path"
) -> datasets.Dataset | datasets.IterableDataset:
    """The rows under `path` through `datasets.load_dataset`.

    Args:
        path: absolute path of a file, or a hub id ``org/name``.
        subset: configuration of a hub dataset.
        split: as `datasets` writes it: ``train``, ``train[:100]``. A file's rows are its split ``train``.
        streaming: give an IterableDataset, which reads rows as they are asked for.
        key: of the run file, named in the error.

    Raises:
        ConfigError: there is no such dataset, it cannot be reached or read, or its cache cannot be written.
    """
    import datasets

    if is_data_file(path) or launch.rank() > 0:
        datasets.disable_progress_bars()  # those of a download stay, on one rank
    try:
        if is_data_file(path):
            # The path is a name, not a pattern, though datasets takes it for one.
            loader, files = LOADERS[Path(path).suffix], glob.escape(path)
            return datasets.load_dataset(loader, data_files=files, split=split, streaming=streaming)
        return datasets.load_dataset(path, subset, split=split, streaming=streaming)
    except Exception as error:
        raise ConfigError(_problem(error, key, _given(path, subset, split))) from error


def _given(path: str, subset: str | None, split: str) -> str:
    return ", ".join([path, *([f"subset {subset}"] if subset else []), f"split {split}"])


def _problem(error: Exception, key: str, given: str) -> Problem:
    import datasets

    first = _first_cause(error)
    if isinstance(first, OSError) and first.errno in _UNWRITABLE:
        return Problem(
            f"datasets cannot write its cache: {first.strerror}: {first.filename}",
            key=key,
            given=f"cache {datasets.config.HF_DATASETS_CACHE}",
            allowed="a folder that can be written, named by HF_HOME or HF_DATASETS_CACHE",
        )
    return Problem(f"cannot be loaded: {reason(error)}", key=key, given=given)


def reason(error: BaseException) -> str:
    """Type and message of the error behind `error`: datasets' own says only that something went wrong."""
    first = _first_cause(error)
    message = " ".join(text_of(first).split())
    return f"{type(first).__name__}: {message}" if message else type(first).__name__


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
