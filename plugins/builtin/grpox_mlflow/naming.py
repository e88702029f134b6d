"""Names and values that MLflow accepts, for runs, metrics, parameters and flattened configs."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

NAME_LENGTH = 250
VALUE_LENGTH = 6000
"""Longest parameter value in characters; MLflow cuts longer values silently."""
TAG_LENGTH = 5000
"""Longest tag value in characters that every version of MLflow accepts."""
KEY_TAG, FOLDER_TAG = "grpox.run", "grpox.output_dir"
"""Tags of every run: its key, which is the same in every store, and its folder."""
PARENT_TAG = "mlflow.parentRunId"
"""Tag by which MLflow shows a run below another."""
CHANGED = "changed."
"""Prefix of the tag of a parameter that has changed since the run began."""


class MlflowNames:
    r"""Maps our names to names that MLflow accepts: one to one, and always the same.

    Characters other than ``\w . - : /`` and space become ``_``. MLflow also refuses names that are not
    normalized paths (``a//b``, ``../a``); the invalid parts are dropped.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._accepted:
            cleaned = posixpath.normpath(re.sub(r"[^\w.\-:/ ]", "_", name)).split("/")
            parts = [part for part in cleaned if part not in ("", ".", "..")]
            accepted = candidate = "/".join(parts)[:NAME_LENGTH].rstrip("/") or "_"
            count = 1
            while candidate in self._accepted.values():
                count += 1
                candidate = f"{accepted[: NAME_LENGTH - 8]}-{count}"
            self._accepted[name] = candidate
        return self._accepted[name]


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Return (dotted key, value as text) of every leaf: ``train.seed``, ``rewards.0.name``; empty ones as
    JSON."""
    for key, value in config.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, list | tuple) and value:
            value = {str(position): item for position, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{dotted}.")
        else:
            yield dotted, json.dumps(value) if isinstance(value, Mapping | list | tuple) else str(value)


def shortened(value: str) -> str:
    """Return `value`, cut to MLflow's limit with a note that ``config.yaml`` has the full value."""
    if len(value) <= VALUE_LENGTH:
        return value
    note = f" ... ({len(value)} characters, whole in config.yaml)"
    return value[: VALUE_LENGTH - len(note)] + note


def model_name_problem(name: str) -> str:
    """Return why MLflow refuses this name for a registered model; empty if it accepts it."""
    refused = sorted(set(name) & set("/:%\"'`"))
    if refused:
        return f"contains {' '.join(refused)}, which MLflow does not allow in a model's name"
    return (
        ""
        if name and name == " ".join(name.split()) == MlflowNames()[name]
        else "is not a name that MLflow allows"
    )
