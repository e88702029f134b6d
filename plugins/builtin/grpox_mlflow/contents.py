"""Datasets and tables in the form that MLflow's pages show.

A dataset consists of its name, digest, location and columns; its rows are not loaded. A table has the format of
MLflow's `log_table`, but is written once: `log_table` itself fetches and uploads the whole table for every row.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpox.errors import redact, redacted
from grpox.toolkit import UnreadableData, look_at, read_samples

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

    from grpox.contracts import RunContext

_DIGEST_LENGTH = 32
"""Hexadecimal digits; MLflow takes 36 characters."""
_NAME_LENGTH = 500
TRAIN, EVALUATION = "train", "eval"
"""Contexts of datasets, with the names of MLflow's own examples."""
EVAL_TABLE, SWEEP_TABLE = "eval_table.json", "sweep_table.json"


def datasets_of(run: RunContext) -> list[dict[str, str]]:
    """Describe a run's training data, and its held-out data if there are any, for `dataset_inputs`.

    The digest is the fingerprint of the file's content, by which a resumed run checks its data. For hub data,
    Python objects and dataset components it is a hash of the run file's text.
    """
    data, evaluation, source = run.config.data, run.config.evaluation, run.config.data.source
    fingerprint = run.fingerprints.get("data.path")
    if source is None:
        hub = {"split": data.split} | ({"config_name": data.subset} if data.subset else {})
        datasets = [_dataset(data.path or "", fingerprint, TRAIN, hub)]
    else:
        where = {"component": source.label, "parameters": redacted(source.params)}
        datasets = [_described("component", source.label, where, fingerprint, TRAIN)]
    sets = () if evaluation is None else zip(evaluation.named_sets.items(), evaluation.set_paths, strict=True)
    for (name, each), key in sets:
        hub = {"split": each.split} | ({"config_name": each.subset} if each.subset else {}) if name else {}
        eval_dataset = _dataset(each.path, run.fingerprints.get(key), EVALUATION, hub)
        if any(all(eval_dataset[part] == other[part] for part in ("name", "digest")) for other in datasets):
            # MLflow identifies a dataset by name and digest, and would omit the second context.
            eval_dataset["name"] += f" ({EVALUATION} {name})" if name else f" ({EVALUATION})"
        datasets.append(eval_dataset)
    return datasets


def dataset_inputs(datasets: Sequence[dict[str, str]]) -> list[DatasetInput]:
    """Build the argument of `MlflowClient.log_inputs`; logging the same datasets twice adds none."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    return [
        DatasetInput(
            Dataset(**{key: value for key, value in each.items() if key != "context"}),
            [InputTag(MLFLOW_DATASET_CONTEXT, each["context"])],
        )
        for each in datasets
    ]


def _dataset(path: str, fingerprint: str | None, context: str, hub: Mapping[str, str]) -> dict[str, str]:
    if fingerprint is None:
        return _described("hugging_face", path, {"path": path, **hub}, None, context)
    file = Path(path)
    dataset = _described("local", file.name, {"uri": file.absolute().as_uri()}, fingerprint, context)
    try:  # schema and number of records, as far as they are cheap
        look = look_at(file) if file.is_file() else None
    except (UnreadableData, OSError):
        look = None
    if look is not None:
        # MLflow's type for columns of unknown content.
        columns = [{"type": "any", "name": name} for name in look.columns]
        dataset["schema"] = json.dumps({"mlflow_colspec": columns})
        if look.records is not None:
            dataset["profile"] = json.dumps({"num_rows": look.records})
    return dataset


def _described(
    kind: str, name: str, where: Mapping[str, object], fingerprint: str | None, context: str
) -> dict[str, str]:
    source = redact(json.dumps(where, sort_keys=True, default=str))
    text = fingerprint or source
    is_hash = len(text) >= _DIGEST_LENGTH and all(digit in "0123456789abcdef" for digit in text)
    digest = text if is_hash else hashlib.sha256(text.encode()).hexdigest()
    return {
        "name": redact(name)[:_NAME_LENGTH],
        "digest": digest[:_DIGEST_LENGTH],
        "source_type": kind,
        "source": source,
        "context": context,
    }


def table_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows as JSON in pandas' form "split", which MLflow reads; missing keys and NaN are null."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    data = [[row.get(column) for column in columns] for row in rows]
    data = [[None if isinstance(v, float) and not math.isfinite(v) else v for v in row] for row in data]
    return json.dumps({"columns": columns, "data": data}, ensure_ascii=False) + "\n"


def completions_table(folder: Path) -> str | None:
    """Format the completions of the report as a table; None if the run saved none.

    The report shows at most eight batches from the first to the last, each with at most 16 completions from the
    best to the worst.
    """
    batches, _ = read_samples(folder)
    rows = [
        {
            "batch": batch.label,
            "prompt": row["prompt"],
            "completion": "\n".join(f"{speaker}: {text}" for speaker, text in row["messages"])
            or row["completion"],
            **{f"data/{name}": value for name, value in row["data"].items()},
            "reward": row["reward"],
            "advantage": row["advantage"],
            **{f"rewards/{name}": value for name, value in row["rewards"].items()},
            **{f"extra/{name}": value for name, value in row["extra"].items()},
            **{name: row[name] for name in ("group", "tokens", "finish_reason")},
        }
        for batch in batches
        for row in batch.rows
    ]
    return table_text(rows) if rows else None
