"""Restores secrets, which a run's folder does not store, from the environment or the run file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, Problem
from grpox.errors.redaction import masked_keys, redacted
from grpox.runfile.recipe_files import recipe_names, recipe_path
from grpox.runfile.yaml_lines import read_yaml
from grpox.runtime.files import parse_json, read_small

VERSIONS = "versions.json"
"""File in a run's folder that names the run file."""


def restore_secrets(data: dict[str, Any], folder: Path) -> list[Problem]:
    """Replace masked secrets in `data` by their values, in place.

    Args:
        folder: the run's folder that `data` was read from; for any other folder, only the environment is used.

    Returns:
        a problem for each secret that neither the environment nor the run file has.
    """
    if masked := frozenset(masked_keys(data)):
        source = _run_file(folder)
        _restore(data, redacted(source), source, masked, "")
    return secret_problems(data)


def secret_problems(data: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each value of `data` that is a masked secret."""
    what = "pass this secret again: it is masked here, because a run's folder stores no secrets"
    return [
        Problem(what, key, allowed=f"{key}=... on the command line, or in the environment {_variable(key)}")
        for key in masked_keys(data)
    ]


def _variable(key: str) -> str:
    """Name the environment variable of a key: ``GRPOX_REWARDS_0_API_KEY``."""
    return "GRPOX_" + re.sub(r"\W+", "_", key).upper()


def _run_file(folder: Path) -> Any:
    """Read the run file that wrote `folder`, by its full path or as a recipe; None if it is missing."""
    with suppress(OSError, ValueError, TypeError, KeyError, ConfigError):
        record = parse_json(read_small(folder / VERSIONS))
        # A file with the name of the source in another folder may belong to another run.
        if "file" in record or record["source"] in recipe_names():
            path = Path(record["file"]) if "file" in record else recipe_path(record["source"])
            return read_yaml(read_small(path), str(path)).data
    return None


def _restore(value: Any, shown: Any, source: Any, masked: frozenset[str], key: str) -> Any:
    """Return `value`, with masks at the keys `masked` replaced from the environment or the run file.

    Args:
        shown: the run file's value under the same key, masked.
        source: the same, not masked.
    """
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            parts = None, None
            with suppress(TypeError, LookupError):  # the run file has no such key
                parts = shown[name], source[name]
            value[name] = _restore(value[name], *parts, masked, f"{key}.{name}".lstrip("."))
    elif key in masked:
        return os.environ.get(_variable(key), source if shown == value and source is not None else value)
    return value
