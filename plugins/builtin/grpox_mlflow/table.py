"""Tables that MLflow's pages show as such: the file that its `log_table` would write, written once.

`log_table` itself fetches and uploads the whole table again for every row that is added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from grpox.toolkit import read_samples

EVALUATION, SWEEP = "eval_table.json", "sweep_table.json"
TABLES = (EVALUATION, SWEEP)
LOGGED = "mlflow.loggedArtifacts"
"""The run's tag that says which of its artifacts are tables."""


def table_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as JSON in pandas' form "split", which MLflow reads; a key that a row lacks is null."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    data = [[_strict(row.get(column)) for column in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, ensure_ascii=False) + "\n"


def completions_table(folder: Path) -> str | None:
    """Completions of a run's folder as such a table; None where it saved none.

    Those that the report shows: at most eight batches from the first to the last, of each at most 16
    completions from the best to the worst.
    """
    batches, _ = read_samples(folder)
    rows = [
        {
            "batch": batch.label,
            "prompt": sample.prompt,
            "completion": sample.completion,
            "reward": sample.reward,
            "advantage": sample.advantage,
            **{f"rewards/{name}": value for name, value in sample.rewards.items()},
            **{f"extra/{name}": value for name, value in sample.extra.items()},
            "group": sample.group,
            "tokens": sample.tokens,
            "finish_reason": sample.finish_reason,
        }
        for batch in batches
        for sample in batch.samples
    ]
    return table_text(rows) if rows else None


def logged_tag(names: Iterable[str]) -> dict[str, str]:
    """The tag for those of `names` that are tables."""
    tables = [{"path": name, "type": "table"} for name in names if name in TABLES]
    return {LOGGED: json.dumps(tables)} if tables else {}


def _strict(value: object) -> object:
    """JSON has no number for NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
