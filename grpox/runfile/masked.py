"""Finds the secrets that a run's folder does not keep: in the environment, or in the run file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, Problem
from grpox.errors.redaction import masked_keys, redacted
from grpox.runfile.recipe_files import recipe_names, recipe_path
from grpox.runfile.yaml_lines import read_yaml

VERSIONS = "versions.json"
"""In a run's folder; names the run file."""


def give_back_secrets(data: dict[str, Any], folder: Path) -> list[Problem]:
    """Put the secrets that are masked in `data` into it.

    Args:
        folder: of the run whose record `data` is; where it is none, the environment alone is looked at.

    Returns:
        a problem for each that is to be found nowhere.
    """
    masked = frozenset(masked_keys(data))
    if masked:
        source = _run_file(folder)
        _give_back(data, redacted(source), source, masked, "")
    return masked_problems(data)


def masked_problems(data: Mapping[str, Any]) -> list[Problem]:
    """A problem for each value of `data` that is only the mask of a secret."""
    what = "a secret is masked here, and no run's folder keeps it: give it again"
    return [
        Problem(what, key, allowed=f"{key}=... on the command line, or in the environment {_variable(key)}")
        for key in masked_keys(data)
    ]


def _variable(key: str) -> str:
    """``GRPOX_REWARDS_0_API_KEY``."""
    return "GRPOX_" + re.sub(r"\W+", "_", key).upper()


def _run_file(folder: Path) -> Any:
    """Read the run file of which `folder` holds the record; None where it is not to be found."""
    try:
        told = json.loads((folder / VERSIONS).read_text(encoding="utf-8"))
        # By its whole path: in another folder a file of that name may be another run's.
        if "file" not in told and told["source"] not in recipe_names():
            return None
        path = Path(told["file"]) if "file" in told else recipe_path(told["source"])
        return read_yaml(path.read_text(encoding="utf-8"), str(path)).data
    except (OSError, ValueError, TypeError, KeyError, ConfigError):
        return None


def _give_back(value: Any, shown: Any, source: Any, masked: frozenset[str], key: str) -> Any:
    """Return `value` with what is masked in it as the environment has it, or the run file.

    Args:
        shown: what stands in the same place of the run file, masked; `source`: the same as it is.
        masked: the keys that need a value; names of headers, say, may have dots of their own.
        key: of `value`.
    """
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            try:
                parts = shown[name], source[name]
            except (TypeError, LookupError):  # the run file has nothing there
                parts = None, None
            value[name] = _give_back(value[name], *parts, masked, f"{key}.{name}".lstrip("."))
    elif key in masked:
        return os.environ.get(_variable(key), source if shown == value and source is not None else value)
    return value
