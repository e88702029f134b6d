"""Completions of a run as the page shows them, read from the files of completions by their ids.

An id is the stem of the file and the row in it, such as ``step_000012:34``: it stays the same while the file
does, and cannot name another file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox.errors import ConfigError, text_of
from grpox.observing.conversation import speeches
from grpox.observing.record_files import COMPLETIONS, finite, read_parquet
from grpox.observing.token_files import has_tokens, read_tokens
from grpox.runtime.files import parse_json

if TYPE_CHECKING:
    import pyarrow

FOLDER = "completions"
"""Folder with the files of completions in a run's folder."""
FILE = re.compile(r"step_(\d+)(?:_(\d+))?")
"""Stem of a file of completions: the step, and the number of the batch if the step used several."""
_ID = re.compile(rf"({FILE.pattern}):(\d+)")
_FACTS = {"rollout_extra": "rollout", "environment_rewards": "environment rewards", "info": "info"}
_FACTS |= {"environment_error": "environment error"}
"""Column -> its name among the further facts of a completion."""


def id_of(stem: str, row: int) -> str:
    """Return the id of a completion."""
    return f"{stem}:{row}"


def prompt_id(prompt: str) -> str:
    """Return the id of a prompt: the same at every step, and in every run."""
    return blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def read_rows(folder: Path, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the completions of these ids in their order; those whose files are gone are left out.

    Args:
        folder: the run's folder.
    """
    wanted: dict[str, list[int]] = {}
    for each in ids:
        stem, row = _parts(each)
        wanted.setdefault(stem, []).append(row)
    read: dict[str, dict[str, Any]] = {}
    for stem, rows in wanted.items():
        for row, values in zip(rows, _take(folder, stem, rows), strict=False):
            read[id_of(stem, row)] = row_of(folder, stem, row, values)
    return [read[each] for each in ids if each in read]


def tokens_of(folder: Path, id: str) -> list[dict[str, Any]]:
    """Return the tokens of a completion with their numbers; empty if the run did not record them.

    Raises:
        ConfigError: no saved completion has this id, or the file of its tokens cannot be read.
    """
    stem, row = _parts(id)
    matches = _take(folder, stem, [row])
    if not matches:
        raise ConfigError("no saved completion has this id", "id", given=id)
    try:
        return read_tokens(folder, *key_of(stem, matches[0]))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokens cannot be read: {text_of(error)}", "id", given=id) from error


def _parts(id: str) -> tuple[str, int]:
    """Split an id; raises ConfigError for a text that is none."""
    match = _ID.fullmatch(id)
    if match is None:
        raise ConfigError("is not the id of a completion", "id", given=id, allowed="such as step_000012:34")
    return match[1], int(match[4])


def batch_of(stem: str) -> tuple[int, int]:
    """Return the step and the number of the batch in the name of a file of completions, which sort by time."""
    match = FILE.fullmatch(stem)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def read_batch(folder: Path, stem: str) -> pyarrow.Table:
    """Read a file of completions; raises ConfigError for one that cannot be read."""
    path = folder / FOLDER / f"{stem}.parquet"
    try:
        return read_parquet(path, COMPLETIONS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read as parquet: {text_of(error)}", where=str(path)) from error


def _take(folder: Path, stem: str, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Read rows of a file, without threads; empty if the file is gone or has become shorter."""
    try:
        table = read_batch(folder, stem)
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    if max(rows) >= len(table):
        return []
    # Not table.take, which imports pandas.
    return [table.slice(row, 1).to_pylist()[0] for row in rows]


def row_of(folder: Path, stem: str, row: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a file in the form of the page."""
    facts = {name: values[column] for column, name in _FACTS.items() if values.get(column) not in (None, "{}")}
    messages = [message for message in _items_of(values.get("messages")) if isinstance(message, Mapping)]
    return {
        "id": id_of(stem, row),
        "step": values["step"],
        "group": values["group"],
        "sample": values["sample"],
        "prompt_id": prompt_id(values["prompt"]),
        "prompt": values["prompt"],
        "completion": values["completion"],
        "reward": finite(values["reward"]),
        "advantage": finite(values["advantage"]),
        "rewards": {label: finite(value) for label, value in _below(values, "rewards/").items()},
        "data": _texts(_below(values, "data/")),
        "extra": _texts(_below(values, "extra/") | facts),
        "finish_reason": values["finish_reason"],
        "tokens": values.get("model_length", values["completion_length"]),
        "turns": len(_items_of(values.get("turns"))),
        "messages": [list(each) for each in speeches(messages)],
        "has_tokens": has_tokens(folder, *key_of(stem, values)),
    }


def key_of(stem: str, values: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the arguments of `read_tokens` behind the folder."""
    step, part = batch_of(stem)
    return step, values["group"], values["sample"], part


def _below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the columns whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _items_of(text: str | None) -> list[Any]:
    """Read a column of JSON; anything but a list counts as empty."""
    try:
        value = parse_json(text or "[]")
    except ValueError:
        return []
    return value if isinstance(value, list) else []
