"""Runs that are checked and not started: of the quickstart with overrides, or with a config as a mapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpox.errors import Problem
from grpox.runfile.load import ResolvedRun, load_run, resolve_config
from grpox.runfile.objects import RunObjects
from support.problems import refused


def refused_quickstart(*overrides: str) -> list[Problem]:
    """Return the problems of the bundled quickstart with these overrides."""
    return refused(load_run, "quickstart", overrides)


class Runs:
    """Checks runs in a folder with a model of 100 positions, which is the working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))

    def resolve(
        self,
        data: dict[str, Any] | None = None,
        rows: list[Any] | None = None,
        given: RunObjects | None = None,
        **sections: Any,
    ) -> ResolvedRun:
        """Check a run of 9 prompts, two a generation batch, with other rows or changed sections."""
        lines = map(json.dumps, rows or [{"prompt": "1+1=", "answer": "2", "env": "lake"}] * 9)
        (self.folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
        config: dict[str, Any] = {
            "model": {"path": "model"},
            "data": {"path": "train.jsonl"} | (data or {}),
            "rewards": ["exact"],
            "train": {"num_generations": 4, "per_device_train_batch_size": 8},
            "sampling": {"max_completion_length": 10},
            "tracking": {},
        }
        return resolve_config(config | sections, self.folder, "test", given=given)

    def refused(self, *arguments: Any, **sections: Any) -> list[Problem]:
        """Return the problems of a run that must have some."""
        return refused(self.resolve, *arguments, **sections)
