"""Completions on disk: one parquet file per saved generation batch, one row per completion."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox.runtime.files import whole_file

if TYPE_CHECKING:
    import pyarrow

    from grpox.contracts import RunContext, ScoredRollout


class CompletionFiles:
    """Decides which generation batches are saved and under which name.

    Whoever observes the same run comes to the same paths: the local record writes them, trackers upload them.
    """

    def __init__(self, run: RunContext) -> None:
        self._folder = run.output_dir / "completions"
        self._every = run.config.logging.save_completions_every
        self._batches = run.generations_before
        self._files: Counter[int] = Counter()

    def next(self, step: int) -> Path | None:
        """The file of the next generation batch, first used in `step`; None when it is not saved."""
        self._batches += 1
        if self._every == 0 or (self._batches - 1) % self._every:
            return None
        self._files[step] += 1
        # Several generation batches may serve one step: then each has a file of its own.
        part = f"_{self._files[step]}" if self._files[step] > 1 else ""
        return self._folder / f"step_{step:06d}{part}.parquet"


def write_completions(path: Path, step: int, rollouts: Sequence[ScoredRollout]) -> None:
    """Write `rollouts` as parquet, whole or not at all.

    Columns: step, group, sample, prompt, completion, reward, advantage, ``rewards/<label>`` for each reward
    function (null where it abstained), finish_reason, policy_version, completion_length (tokens), and
    ``extra/<name>`` for what reward functions logged.
    """
    import pyarrow
    from pyarrow import parquet

    labels = list(dict.fromkeys(label for scored in rollouts for label in scored.rewards))
    text, number, integer = pyarrow.string(), pyarrow.float64(), pyarrow.int64()
    columns = {
        "step": pyarrow.array([step] * len(rollouts), integer),
        "group": pyarrow.array([scored.rollout.group_id for scored in rollouts], integer),
        "sample": pyarrow.array([scored.rollout.sample for scored in rollouts], integer),
        "prompt": pyarrow.array([scored.prompt for scored in rollouts], text),
        "completion": pyarrow.array([scored.completion for scored in rollouts], text),
        "reward": pyarrow.array([scored.reward for scored in rollouts], number),
        "advantage": pyarrow.array([scored.advantage for scored in rollouts], number),
        **{
            f"rewards/{label}": pyarrow.array([scored.rewards.get(label) for scored in rollouts], number)
            for label in labels
        },
        "finish_reason": pyarrow.array([scored.rollout.finish_reason for scored in rollouts], text),
        "policy_version": pyarrow.array([scored.rollout.policy_version for scored in rollouts], integer),
        "completion_length": pyarrow.array(
            [len(scored.rollout.completion_ids) for scored in rollouts], integer
        ),
    }
    extras = dict.fromkeys(name for scored in rollouts for name in scored.extra)
    for name in extras:
        columns[f"extra/{name}"] = _extra_column([scored.extra.get(name) for scored in rollouts])
    with whole_file(path) as unfinished:
        # Dictionaries where values come several times: elsewhere they are only work.
        parquet.write_table(pyarrow.table(columns), unfinished, use_dictionary=["prompt", "finish_reason"])


def _extra_column(values: list[Any]) -> pyarrow.Array:
    """Numbers and truth values as they are, anything else as text: a column of mixed types has none."""
    import pyarrow

    if all(value is None or isinstance(value, bool | int | float) for value in values):
        with contextlib.suppress(pyarrow.ArrowException, OverflowError):
            return pyarrow.array(values)
    return pyarrow.array([None if value is None else _text(value) for value in values], pyarrow.string())


def _text(value: Any) -> str:
    """`value` as UTF-8 can hold it: half of a surrogate pair stands as its escape."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
