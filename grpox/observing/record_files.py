"""Growing files of a run's record: lines of metrics, and a parquet file of completions for each batch."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from grpox.errors import describe, text_of
from grpox.errors.formatting import format_bytes
from grpox.runtime.files import atomic_path, open_regular, without_nan

if TYPE_CHECKING:
    import pyarrow

    from grpox.contracts import Rollout, ScoredRollout, ToolResult

MOST_OF_ANSWER = 10_000
"""Characters of a tool's answer in the record; a web page in each call would fill the disk."""
MOST_STEPS, LAST_TIME = 10**12, 1e11
"""Bounds of steps and of Unix seconds."""


class MetricsLine(NamedTuple):
    """Values that one optimizer step or one evaluation logged: a line of ``metrics.jsonl``."""

    step: int
    time: float
    """Unix seconds."""
    values: dict[str, float]
    is_evaluation: bool

    @classmethod
    def parse(cls, line: str | bytes) -> MetricsLine:
        """Read it.

        Raises:
            ValueError: it is no such line; a process that was killed may leave half of one.
        """
        try:
            fields = json.loads(line if isinstance(line, str) else line.decode())  # without a guess at UTF-16
            kind = "metrics" if "metrics" in fields else "evaluation"
            values = {name: float(value) for name, value in fields[kind].items()}
            step, time = int(fields["step"]), float(fields["time"])
            if not (0 <= step <= MOST_STEPS and 0 <= time <= LAST_TIME):
                raise ValueError(f"step {step:g} or time {time:g} is out of bounds")
            return cls(step, time, values, kind == "evaluation")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(describe(error)) from error

    @property
    def named_values(self) -> dict[str, float]:
        """The values, those of an evaluation below ``evaluation/``."""
        if not self.is_evaluation:
            return self.values
        prefix = "evaluation/"
        return {prefix + name.removeprefix(prefix): value for name, value in self.values.items()}


_OF_EPISODES = {
    "model_length": "int64",
    **dict.fromkeys(("turns", "environment", "environment_error", "messages", "tool_calls"), "string"),
    **dict.fromkeys(("environment_rewards", "info"), "string"),
}
_COLUMNS = {
    **dict.fromkeys(("step", "group", "sample"), "int64"),
    **dict.fromkeys(("prompt", "completion"), "string"),
    **dict.fromkeys(("reward", "advantage", "rewards"), "float64"),
    "finish_reason": "string",
    **dict.fromkeys(("policy_version", "completion_length"), "int64"),
    **dict.fromkeys(("extra", "data")),
    "rollout_extra": "string",
    **_OF_EPISODES,
}
"""Columns of a file of completions, in their order -> their types; None: the type of the values. ``rewards``,
``extra`` and ``data`` stand for all columns below them, such as ``rewards/exact``."""
_NEEDED = ("step", "group", "sample", "prompt", "completion", "reward", "advantage", "finish_reason")
COMPLETIONS = {name: _COLUMNS[name] for name in (*_NEEDED, "completion_length")}
"""Columns with a value in each row of such a file -> their types."""
MOST_CONTENT = 8 << 30
"""Largest unpacked content in bytes of a parquet file that is read."""


def read_parquet(
    path: Path,
    needed: Mapping[str, Any],
    types: Mapping[str, Any] = _COLUMNS,
    columns: Collection[str] | None = None,
) -> pyarrow.Table:
    """Read a parquet file of a run, without threads; raises OSError or ValueError for what no run writes.

    Args:
        needed: columns with a value in each row -> their types.
        types: types of other columns; those of rewards are numbers.
        columns: those of `needed` that are read; None: all columns of the file.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        # read_table would load pyarrow's engine for data sets
        with open_regular(path) as source, parquet.ParquetFile(source) as file:
            groups = (file.metadata.row_group(place) for place in range(file.num_row_groups))
            if sum(group.total_byte_size for group in groups) > MOST_CONTENT:
                raise ValueError(f"unpacks to more than {format_bytes(MOST_CONTENT)}")
            names = file.schema_arrow.names
            table = file.read(columns=None if columns is None else list(columns), use_threads=False)
        for name in needed:
            is_read = columns is None or name in columns
            if names.count(name) != 1 or (is_read and table[name].null_count):
                raise ValueError(f"column {name!r} is missing, or has no value in some rows")
        rewards = {name: "float64" for name in table.column_names if name.startswith("rewards/")}
        kinds = {**rewards, **types, **needed}
        fields = [(each.name, kinds.get(each.name) or each.type) for each in table.schema]
        return table.cast(pyarrow.schema(fields))
    except (pyarrow.ArrowException, KeyError) as error:
        if isinstance(error, ValueError):
            raise
        raise ValueError(text_of(error)) from error


def finite(value: Any) -> Any:
    """Replace a number that JSON lacks by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_completions(path: Path, step: int, rollouts: Sequence[ScoredRollout]) -> None:
    """Write `rollouts` as parquet, whole or not at all.

    Columns: step, group, sample, prompt, completion, reward, advantage, ``rewards/<label>`` for each reward
    function (null where it abstained), finish_reason, policy_version, completion_length (tokens),
    ``extra/<name>`` for what reward functions logged, ``data/<name>`` for the data's other columns, and where
    generators told further facts ``rollout_extra``, `Rollout.extra` as JSON. Batches of episodes have the
    columns of `_describe_episode` too.
    """
    import pyarrow
    from pyarrow import parquet

    rows: list[dict[str, Any]] = []
    names: dict[str, Any] = dict.fromkeys((*COMPLETIONS, "policy_version"))
    has_episodes = False
    for scored in rollouts:
        rollout = scored.rollout
        row = {
            "step": step,
            "group": rollout.group_id,
            "sample": rollout.sample,
            "prompt": scored.prompt,
            "completion": scored.completion,
            "reward": scored.reward,
            "advantage": scored.advantage,
            "finish_reason": rollout.finish_reason,
            "policy_version": rollout.policy_version,
            "completion_length": len(rollout.completion_ids),
        }
        for label, score in scored.rewards.items():
            row[f"rewards/{label}"] = score
        for name, value in scored.extra.items():
            row[f"extra/{name}"] = value
        for name, value in scored.columns.items():
            row[f"data/{name}"] = as_json(value) if isinstance(value, list | dict) else value
        if rollout.extra:
            row["rollout_extra"] = as_json(rollout.extra)
        has_episodes = has_episodes or bool(rollout.turns) or rollout.episode is not None
        rows.append(row)
        names |= row
    if has_episodes:
        for row, scored in zip(rows, rollouts, strict=True):
            row |= _describe_episode(scored.rollout)
            names |= row
    order, columns = list(_COLUMNS), {}
    for name in sorted(names, key=lambda name: order.index(name.partition("/")[0])):
        columns[name] = _column(name, [row.get(name) for row in rows])
    repeated = ["prompt", "finish_reason", *(name for name in columns if name.startswith("data/"))]
    with atomic_path(path) as unfinished:
        # Dictionary encoding only for columns with repeated values: elsewhere it costs time.
        parquet.write_table(pyarrow.table(columns), unfinished, use_dictionary=repeated)


def _column(name: str, values: list[Any]) -> pyarrow.Array:
    """Return a column with its type; without one, numbers, booleans and texts as they are, all else as text."""
    import pyarrow

    if kind := _COLUMNS[name.partition("/")[0]]:
        return pyarrow.array(values, kind)
    kinds = {*map(type, values)} - {NoneType}
    if kinds == {str} or all(issubclass(kind, bool | int | float) for kind in kinds):
        with contextlib.suppress(pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
            return pyarrow.array(values)
    texts = [None if value is None else _encodable(str(value)) for value in values]
    return pyarrow.array(texts, "string")


def _describe_episode(rollout: Rollout) -> dict[str, Any]:
    """Return the values of a row of a batch with episodes; most are null for a completion without one.

    ``model_length`` (tokens that the model wrote), ``environment``, ``environment_error`` (null where all went
    well), and as JSON ``turns``, ``messages``, ``tool_calls``, ``environment_rewards`` and ``info``.
    """
    mask, episode = rollout.model_mask, rollout.episode
    values: dict[str, Any] = dict.fromkeys(_OF_EPISODES)
    values["model_length"] = len(rollout.completion_ids) if mask is None else sum(map(bool, mask))
    values["turns"] = as_json([vars(turn) for turn in rollout.turns])
    if episode is not None:
        values["environment"] = episode.environment
        values["environment_error"] = _encodable(episode.lost or episode.failure) or None
        values["messages"] = as_json(list(episode.messages))
        values["tool_calls"] = as_json([_call(result) for result in episode.results])
        values["environment_rewards"] = None if episode.rewards is None else as_json(episode.rewards)
        values["info"] = as_json(episode.info)
    return values


def _call(result: ToolResult) -> dict[str, Any]:
    """Return a call without its seconds: two runs of one seed have the same record.

    The model sees only the beginning of a long answer, see `messages`; here it has a limit as well.
    """
    plain = {name: value for name, value in result.plain().items() if name != "seconds"}
    dropped = len(result.content) - MOST_OF_ANSWER
    if dropped > 0:
        plain["content"] = f"{result.content[:MOST_OF_ANSWER]}... ({dropped:,} further characters)"
    return plain


def as_json(value: Any) -> str:
    """Write a value as JSON; what JSON lacks, such as a date, as its text."""
    return _encodable(json.dumps(without_nan(value), ensure_ascii=False, default=str))


def _encodable(text: str) -> str:
    """Escape half of a surrogate pair, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class MetricsFile:
    """Appends lines in order. A line that cannot be written waits, and is written before the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[str] = deque()
        """Lines not yet written."""

    def catch_up(self) -> None:
        """Write the waiting lines.

        Raises:
            OSError: there is no space. The line keeps waiting, and no part of it is in the file.
        """
        if not self.waiting:
            return
        with open_regular(self.path, "ab") as file:
            while self.waiting:
                before = file.seek(0, os.SEEK_END)
                rest = memoryview(self.waiting[0].encode() + b"\n")
                try:
                    while rest:  # a nearly full disk may accept only a part at first
                        rest = rest[file.write(rest) or 0 :]
                except BaseException:
                    file.truncate(before)
                    raise
                self.waiting.popleft()
