"""The data of a run as MLflow's dataset inputs: name, digest, place, columns. No row of it is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpox.errors import redact, redacted
from grpox.toolkit import UnreadableData, look_at

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

    from grpox.contracts import RunContext

_DIGEST_LENGTH = 32
"""Hexadecimal digits; MLflow takes 36 characters."""
_NAME_LENGTH = 500
TRAIN, EVALUATION = "train", "eval"
"""Contexts, as MLflow's own examples name them."""


def datasets_of(run: RunContext) -> list[dict[str, str]]:
    """What a run reads, as `dataset_inputs` takes it: training data, and held-out data where there are any.

    The digest is that of the file's content, as a checkpoint holds it to see that a run resumes on the same
    data; of data on a hub, given in Python or from a component it is that of what the run file says of them.
    """
    config = run.config
    told = [_dataset(run, "data.path", config.data.path, TRAIN, _hub(run))]
    if config.evaluation is not None:
        told.append(_dataset(run, "evaluation.path", config.evaluation.path, EVALUATION, {}))
        if (told[1]["name"], told[1]["digest"]) == (told[0]["name"], told[0]["digest"]):
            # MLflow knows a dataset by both and would leave out the second context.
            told[1]["name"] += f" ({EVALUATION})"
    return told


def dataset_inputs(told: Sequence[dict[str, str]]) -> list[DatasetInput]:
    """What `MlflowClient.log_inputs` takes; the same ones twice are one."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    return [
        DatasetInput(
            Dataset(
                name=each["name"],
                digest=each["digest"],
                source_type=each["source_type"],
                source=each["source"],
                schema=each.get("schema"),
                profile=each.get("profile"),
            ),
            [InputTag(MLFLOW_DATASET_CONTEXT, each["context"])],
        )
        for each in told
    ]


def _dataset(run: RunContext, key: str, path: str | None, context: str, hub: dict[str, str]) -> dict[str, str]:
    source = run.config.data.source if key == "data.path" else None
    known = run.fingerprints.get(key)
    if source is not None:
        parameters = redacted(source.params)
        kind, name, where = "component", source.label, {"component": source.label, "parameters": parameters}
    elif known is not None:
        kind, name, where = "local", Path(path or "").name, {"uri": Path(path or "").absolute().as_uri()}
    else:
        kind, name, where = "hugging_face", path or "", {"path": path or "", **hub}
    told = redact(json.dumps(where, sort_keys=True, default=str))
    dataset = {
        "name": redact(name)[:_NAME_LENGTH],
        "digest": _hexadecimal(known or told),
        "source_type": kind,
        "source": told,
        "context": context,
    }
    return dataset | (dict(_columns(Path(path))) if known is not None and path else {})


def _hub(run: RunContext) -> dict[str, str]:
    data = run.config.data
    return {"split": data.split} | ({"config_name": data.subset} if data.subset else {})


def _columns(path: Path) -> Iterator[tuple[str, str]]:
    """Schema and number of records of a file, as far as a cheap look tells them."""
    if not path.is_file():
        return
    try:
        found = look_at(path)
    except (UnreadableData, OSError):
        return
    # What is in a column is not looked at: MLflow's schema has a type for that, too.
    yield "schema", json.dumps({"mlflow_colspec": [{"type": "any", "name": name} for name in found.columns]})
    if found.records is not None:
        yield "profile", json.dumps({"num_rows": found.records})


def _hexadecimal(text: str) -> str:
    """The beginning of a hash that `text` is, else of its own."""
    is_hash = len(text) >= _DIGEST_LENGTH and all(digit in "0123456789abcdef" for digit in text)
    return (text if is_hash else hashlib.sha256(text.encode()).hexdigest())[:_DIGEST_LENGTH]
