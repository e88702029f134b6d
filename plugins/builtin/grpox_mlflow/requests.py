"""Cuts what is to be written into requests that MLflow takes: by number and by size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param

    Entity = TypeVar("Entity", Metric, Param)

PARAMS_PER_BATCH = 100
"""MLflow's limit for one request."""
BYTES_PER_REQUEST = 900_000
"""MLflow refuses a request of more than a million."""
_OVERHEAD = 150
"""Bytes of a metric or parameter besides its name and text: numbers, names of fields, punctuation."""


def in_requests(entities: Sequence[Entity], most: int) -> Iterator[list[Entity]]:
    """`entities` in order, at most `most` of them in a request, and no more than fit into one."""
    batch: list[Entity] = []
    size = 0
    for entity in entities:
        # As JSON, which writes a letter outside ASCII in up to twelve bytes.
        own = len(json.dumps([entity.key, entity.value])) + _OVERHEAD
        if batch and (len(batch) == most or size + own > BYTES_PER_REQUEST):
            yield batch
            batch, size = [], 0
        batch.append(entity)
        size += own
    if batch:
        yield batch
