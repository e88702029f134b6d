"""Growing files of a run's record: lines of metrics, and a parquet file of completions for each batch."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpox.errors import describe, text_of
from grpox.errors.formatting import format_bytes
from grpox.runtime.files import atomic_path, open_regular, without_nan

if TYPE_CHECKING:
    import pyarrow

    from grpox.contracts import Episode, Rollout, ScoredRollout, ToolResult

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


COMPLETIONS = {
    **dict.fromkeys(("step", "group", "sample", "completion_length"), "int64"),
    **dict.fromkeys(("reward", "advantage"), "float64"),
    **dict.fromkeys(("prompt", "completion", "finish_reason"), "string"),
}
"""Columns of a file of completions with a value in each row -> their types."""
MOST_CONTENT = 8 << 30
"""Largest unpacked content in bytes of a parquet file that is read."""
_OPTIONAL = {"model_length": "int64", **dict.fromkeys(("turns", "messages", "rollout_extra", "info"), "string")}


def read_parquet(
    path: Path,
    needed: Mapping[str, Any],
    types: Mapping[str, Any] = _OPTIONAL,
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
        fields = [(each.name, kinds.get(each.name, each.type)) for each in table.schema]
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
    columns of `_episode_columns` too.
    """
    import pyarrow
    from pyarrow import parquet

    text, number, integer = pyarrow.string(), pyarrow.float64(), pyarrow.int64()
    sampled = [scored.rollout for scored in rollouts]

    def names(of: Callable[[ScoredRollout], Iterable[str]]) -> Iterable[str]:
        return dict.fromkeys(name for scored in rollouts for name in of(scored))

    columns = {
        "step": pyarrow.array([step] * len(rollouts), integer),
        "group": pyarrow.array([rollout.group_id for rollout in sampled], integer),
        "sample": pyarrow.array([rollout.sample for rollout in sampled], integer),
        "prompt": pyarrow.array([scored.prompt for scored in rollouts], text),
        "completion": pyarrow.array([scored.completion for scored in rollouts], text),
        "reward": pyarrow.array([scored.reward for scored in rollouts], number),
        "advantage": pyarrow.array([scored.advantage for scored in rollouts], number),
    }
    for label in names(lambda scored: scored.rewards):
        columns[f"rewards/{label}"] = pyarrow.array([scored.rewards.get(label) for scored in rollouts], number)
    columns["finish_reason"] = pyarrow.array([rollout.finish_reason for rollout in sampled], text)
    columns["policy_version"] = pyarrow.array([rollout.policy_version for rollout in sampled], integer)
    columns["completion_length"] = pyarrow.array([len(each.completion_ids) for each in sampled], integer)
    for name in names(lambda scored: scored.extra):
        columns[f"extra/{name}"] = _extra_column([scored.extra.get(name) for scored in rollouts])
    for name in names(lambda scored: scored.columns):
        columns[f"data/{name}"] = _data_column([scored.columns.get(name) for scored in rollouts])
    repeated = ["prompt", "finish_reason", *(name for name in columns if name.startswith("data/"))]
    if any(rollout.extra for rollout in sampled):
        facts = [as_json(rollout.extra) if rollout.extra else None for rollout in sampled]
        columns["rollout_extra"] = pyarrow.array(facts, text)
    if any(rollout.turns or rollout.episode is not None for rollout in sampled):
        columns |= _episode_columns(sampled)
    with atomic_path(path) as unfinished:
        # Dictionary encoding only for columns with repeated values: elsewhere it costs time.
        parquet.write_table(pyarrow.table(columns), unfinished, use_dictionary=repeated)


def _episode_columns(rollouts: Sequence[Rollout]) -> dict[str, pyarrow.Array]:
    """Return the columns of episodes.

    ``model_length`` (tokens that the model wrote), ``environment``, ``environment_error`` (null where all went
    well), and as JSON ``turns``, ``messages``, ``tool_calls``, ``environment_rewards`` and ``info``.
    """
    import pyarrow

    lengths = [
        len(each.completion_ids) if each.model_mask is None else sum(map(bool, each.model_mask))
        for each in rollouts
    ]
    texts: dict[str, Callable[[Episode], str | None]] = {
        "environment": lambda each: each.environment,
        "environment_error": lambda each: _encodable(each.lost or each.failure) or None,
        "messages": lambda each: as_json(list(each.messages)),
        "tool_calls": lambda each: as_json([_call(result) for result in each.results]),
        "environment_rewards": lambda each: None if each.rewards is None else as_json(each.rewards),
        "info": lambda each: as_json(each.info),
    }
    turns = [as_json([vars(turn) for turn in each.turns]) for each in rollouts]
    columns = {"model_length": pyarrow.array(lengths, pyarrow.int64()), "turns": pyarrow.array(turns)}
    for name, read in texts.items():
        values = [None if each.episode is None else read(each.episode) for each in rollouts]
        columns[name] = pyarrow.array(values, pyarrow.string())
    return columns


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


def _extra_column(values: list[Any]) -> pyarrow.Array:
    """Return a column of numbers or booleans unchanged, and any other column as text."""
    import pyarrow

    if all(value is None or isinstance(value, bool | int | float) for value in values):
        with contextlib.suppress(pyarrow.ArrowException, OverflowError):
            return pyarrow.array(values)
    texts = (_encodable(str(value)) for value in values)
    plain = [None if value is None else text for value, text in zip(values, texts, strict=True)]
    return pyarrow.array(plain, pyarrow.string())


def _data_column(values: list[Any]) -> pyarrow.Array:
    """Return a column of the data: text, numbers and booleans unchanged, lists and mappings as JSON."""
    return _extra_column([as_json(value) if isinstance(value, list | dict) else value for value in values])


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
