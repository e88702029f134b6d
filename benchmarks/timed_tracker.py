"""The MLflow tracker, with the seconds that each of its hook calls took, one a line in ``hooks.txt``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from grpox.plugins.hookspecs import hookimpl
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.tracker import MlflowTracker

OF_STEPS = (
    "grpox_rollouts_scored",
    "grpox_step_finished",
    "grpox_evaluated",
    "grpox_checkpoint_saved",
)


class TimedTracker(MlflowTracker):
    """Named by path in a run file."""

    Config = MlflowConfig


def _timed(hook: str) -> Callable[..., None]:
    call = getattr(MlflowTracker, hook)

    @wraps(call)
    def timed(*arguments: Any, **named: Any) -> None:
        began = time.perf_counter()
        try:
            call(*arguments, **named)
        finally:
            with Path("hooks.txt").open("a", encoding="utf-8") as file:
                file.write(f"{hook} {time.perf_counter() - began:.6f}\n")

    return timed


for _hook in OF_STEPS:
    setattr(TimedTracker, _hook, hookimpl(_timed(_hook)))
