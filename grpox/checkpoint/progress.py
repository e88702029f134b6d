"""What a checkpoint says of the run as a whole: how far it was, and what it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from grpox.checkpoint.training_state import TrainingState
from grpox.config.sampling import evaluation_in
from grpox.observing.early_stop import EarlyStopState
from grpox.runfile.lock.model import Lock
from grpox.runtime.files import sync

PROGRESS = "run.json"


class Progress(BaseModel):
    """Written by rank 0, read by all."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="strings")

    step: int
    """Optimizer steps done: the version of the weights."""
    world_size: int
    num_tokens: int
    """Tokens of prompts and completions so far."""
    seconds: float
    """Of training so far."""
    evaluation_before: dict[str, float]
    """What the evaluation before the first step gave; empty where there is none."""
    metrics: dict[str, float]
    """Of this step: what the best checkpoint is chosen by."""
    metrics_bytes: int
    """How long metrics.jsonl was."""
    prompts_drawn: int = 0
    """How far in the order of prompts the run was, with dynamic sampling; else the step tells."""
    early_stop: EarlyStopState | None = None
    """How `evaluation.early_stop` stands; None where the run has none."""
    skipped_steps: int = 0
    """Steps that were skipped because they were not finite."""
    skipped_in_a_row: int = 0
    """Of these, the last ones without a step between them that was taken."""
    config: dict[str, Any]
    """The resolved config."""
    data: dict[str, str]
    """What the run reads, by its key in the run file -> its fingerprint."""
    lock: Lock
    """Which code the run was made with."""

    def write(self, folder: Path) -> None:
        """On disk when this returns."""
        path = folder / PROGRESS
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        sync(path)

    @classmethod
    def read(cls, folder: Path) -> Progress:
        """
        Raises:
            ValueError: it is missing or is none.
        """
        try:
            return cls.model_validate(json.loads((folder / PROGRESS).read_text(encoding="utf-8")))
        except (OSError, ValidationError, ValueError) as error:
            raise ValueError(f"{PROGRESS} cannot be read: {type(error).__name__}") from error

    def restore(self, state: TrainingState) -> None:
        """Make `state` what it was, but for what each rank has for itself."""
        state.num_tokens = self.num_tokens
        state.evaluation_before, state.evaluation = self.evaluation_before, evaluation_in(self.metrics)
        state.seconds_before = self.seconds
        state.skipped.total, state.skipped.in_a_row = self.skipped_steps, self.skipped_in_a_row
        if state.cursor is not None:
            state.cursor.restore(self.prompts_drawn)
        if state.early_stop is not None:
            state.early_stop.restore(self.early_stop)
