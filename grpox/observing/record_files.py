"""Growing files of a run's record: lines of metrics, and a parquet file of completions for each batch."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpox.errors import describe
from grpox.runtime.files import atomic_path

if TYPE_CHECKING:
    import pyarrow

    from grpox.contracts import Rollout, RunContext, ScoredRollout


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
            fields = json.loads(line)
            kind = "metrics" if "metrics" in fields else "evaluation"
            values = {name: float(value) for name, value in fields[kind].items()}
            return cls(int(fields["step"]), float(fields["time"]), values, kind == "evaluation")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(describe(error)) from error

    @property
    def named_values(self) -> dict[str, float]:
        """The values, those of an evaluation below ``evaluation/``."""
        prefix = "evaluation/" if self.is_evaluation else ""
        return {prefix + name.removeprefix(prefix): value for name, value in self.values.items()}


class CompletionFiles:
    """Selects the generation batches to save, and names their files.

    All observers of a run compute the same paths: the record writes the files, and trackers upload them.
    """

    def __init__(self, run: RunContext) -> None:
        self._folder = run.output_dir / "completions"
        self._every = run.config.logging.save_completions_every
        self._batches = run.generations_before
        self._files: Counter[int] = Counter()

    def next(self, step: int) -> Path | None:
        """Return the file of the next generation batch, first used in `step`; None if it is not saved."""
        self._batches += 1
        if self._every == 0 or (self._batches - 1) % self._every:
            return None
        self._files[step] += 1
        # If one step uses several generation batches, each batch has its own file.
        part = f"_{self._files[step]}" if self._files[step] > 1 else ""
        return self._folder / f"step_{step:06d}{part}.parquet"


def write_completions(path: Path, step: int, rollouts: Sequence[ScoredRollout]) -> None:
    """Write `rollouts` as parquet, whole or not at all.

    Columns: step, group, sample, prompt, completion, reward, advantage, ``rewards/<label>`` for each reward
    function (null where it abstained), finish_reason, policy_version, completion_length (tokens),
    ``extra/<name>`` for what reward functions logged, and where generators told further facts
    ``rollout_extra``, `Rollout.extra` as JSON.
    """
    import pyarrow
    from pyarrow import parquet

    text, number, integer = pyarrow.string(), pyarrow.float64(), pyarrow.int64()
    sampled = [scored.rollout for scored in rollouts]
    columns = {
        "step": pyarrow.array([step] * len(rollouts), integer),
        "group": pyarrow.array([rollout.group_id for rollout in sampled], integer),
        "sample": pyarrow.array([rollout.sample for rollout in sampled], integer),
        "prompt": pyarrow.array([scored.prompt for scored in rollouts], text),
        "completion": pyarrow.array([scored.completion for scored in rollouts], text),
        "reward": pyarrow.array([scored.reward for scored in rollouts], number),
        "advantage": pyarrow.array([scored.advantage for scored in rollouts], number),
    }
    for label in dict.fromkeys(label for scored in rollouts for label in scored.rewards):
        columns[f"rewards/{label}"] = pyarrow.array([scored.rewards.get(label) for scored in rollouts], number)
    columns["finish_reason"] = pyarrow.array([rollout.finish_reason for rollout in sampled], text)
    columns["policy_version"] = pyarrow.array([rollout.policy_version for rollout in sampled], integer)
    lengths = [len(rollout.completion_ids) for rollout in sampled]
    columns["completion_length"] = pyarrow.array(lengths, integer)
    for name in dict.fromkeys(name for scored in rollouts for name in scored.extra):
        columns[f"extra/{name}"] = _extra_column([scored.extra.get(name) for scored in rollouts])
    if any(rollout.extra for rollout in sampled):
        facts = [describe_extra(rollout) for rollout in sampled]
        columns["rollout_extra"] = pyarrow.array(facts, text)
    with atomic_path(path) as unfinished:
        # Dictionary encoding only for columns with repeated values: elsewhere it costs time.
        parquet.write_table(pyarrow.table(columns), unfinished, use_dictionary=["prompt", "finish_reason"])


def describe_extra(rollout: Rollout) -> str | None:
    """Write `rollout.extra` as JSON; None where it is empty. Half of a surrogate pair becomes an escape."""
    if not rollout.extra:
        return None
    return json.dumps(rollout.extra, ensure_ascii=False).encode("utf-8", "backslashreplace").decode("utf-8")


def _extra_column(values: list[Any]) -> pyarrow.Array:
    """Return a column of numbers or booleans unchanged, and any other column as text."""
    import pyarrow

    if all(value is None or isinstance(value, bool | int | float) for value in values):
        with contextlib.suppress(pyarrow.ArrowException, OverflowError):
            return pyarrow.array(values)
    # UTF-8 cannot encode half of a surrogate pair, so it is escaped.
    texts = (str(value).encode("utf-8", "backslashreplace").decode("utf-8") for value in values)
    plain = [None if value is None else text for value, text in zip(values, texts, strict=True)]
    return pyarrow.array(plain, pyarrow.string())


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
        with self.path.open("ab", buffering=0) as file:
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
