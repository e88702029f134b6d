"""Compares the configs of runs for the page that lays them over each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpox.errors.redaction import redacted
from grpox.observing.page.data import read_config
from grpox.runfile.yaml_lines import leaves

_OWN = ("output_dir",)
"""Keys in which runs differ by nature."""


def compare(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return the keys of the configs that differ, with a value for each run; None where a run lacks the key.

    Args:
        folders: name on the page -> the run's folder.

    Raises:
        ConfigError: a config cannot be read.
    """
    configs = [dict(leaves(redacted(read_config(folder)[1]))) for folder in folders.values()]
    keys = dict.fromkeys(key for config in configs for key in config if key not in _OWN)
    rows = [[key, [_text(config[key]) if key in config else None for config in configs]] for key in keys]
    return {"runs": list(folders), "keys": [row for row in rows if len(set(row[1])) > 1]}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
