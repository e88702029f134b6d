"""Prompts given in Python as a dataset that a run can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpox.errors import ConfigError, Problem, describe
from grpox.runfile.origins import ARGUMENT

if TYPE_CHECKING:
    import datasets

_ALLOWED = "a datasets.Dataset or IterableDataset, a list of dicts, a file's path, or a hub id"


def as_dataset(value: Any, key: str) -> datasets.Dataset | datasets.IterableDataset:
    """`value` as plain rows: a dataset's format (torch, numpy) is set aside, a list becomes a dataset.

    Args:
        key: section of the run file that it stands for: ``data`` or ``evaluation``, which takes no stream.

    Raises:
        ConfigError: it is none of these, or its rows do not make a table.
    """
    import datasets

    if isinstance(value, datasets.IterableDataset):
        if key == "evaluation":
            raise _refused(key, "is a stream; every held-out prompt is completed in each evaluation", value)
        return value
    if isinstance(value, datasets.Dataset):
        return value.with_format(None)
    if isinstance(value, Mapping):
        names = [str(name) for name in value]
        what = f"is several datasets or a mapping of columns, not rows: {', '.join(names)}"
        raise _refused(key, what, value)
    if isinstance(value, Sequence) and all(isinstance(row, Mapping) for row in value):
        return _from_rows(value, key)
    raise _refused(key, "holds no rows", value)


def _from_rows(rows: Sequence[Mapping[str, Any]], key: str) -> datasets.Dataset:
    import datasets

    # All columns of all rows: Dataset.from_list takes those of the first row and drops the rest.
    columns = dict.fromkeys(name for row in rows for name in row)
    try:
        return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})
    except Exception as error:
        what = f"its rows do not make a table: {describe(error)}"
        allowed = "values of one type in each column"
        raise ConfigError(Problem(what, key=key, where=ARGUMENT, allowed=allowed)) from error


def _refused(key: str, what: str, value: Any) -> ConfigError:
    return ConfigError(Problem(what, key=key, where=ARGUMENT, given=type(value).__name__, allowed=_ALLOWED))
