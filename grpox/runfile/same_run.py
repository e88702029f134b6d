"""Compare the resolved configs of two runs, but for what changes nothing that is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpox.config import RunConfig
from grpox.errors.redaction import redacted
from grpox.runfile.lock.differences import Difference, config_differences

FREE = ("output_dir", "logging", "checkpoint", "tracking", "hub", "plugins", "watchdog")
"""Sections of the run file that change nothing of what is computed."""
FREE_KEYS = ("train.on_nonfinite", "train.max_skips_in_a_row", "evaluation.early_stop")
"""Keys that are changed for a run that stopped to go on."""


def changes(saved: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """The keys by which `config` is another run's than the resolved config `saved`."""
    return [
        found
        for found in config_differences(redacted(saved), redacted(config.model_dump(mode="json")))
        if found.what.partition(".")[0].partition("[")[0] not in FREE and not found.what.startswith(FREE_KEYS)
    ]
