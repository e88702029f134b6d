"""Builders of a run's context and of scored completions, for tests that call observers by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout


def config_of(**sections: Any) -> RunConfig:
    """Return a run file with the three sections that it needs, and these ones in addition or in their place."""
    needed = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"]}
    return RunConfig.model_validate(needed | sections)


def context_of(folder: Path, total_steps: int = 10, world_size: int = 1, **sections: Any) -> RunContext:
    """Return the context of a run into `folder`."""
    versions = {"grpox": "0.1.0"}
    return RunContext(config_of(**sections), folder, total_steps, world_size, versions, None, "run.yaml")


def scored(reward: float = 1.0, completion: str = "4", prompt: str = "2+2=", **fields: Any) -> ScoredRollout:
    """Return a completion of two tokens by one reward, `math`, with other `fields` in place of its own."""
    rollout = Rollout(0, 0, (1,), (2, 3), "stop", 0)
    return replace(ScoredRollout(rollout, prompt, completion, {"math": reward}, reward, 0.5), **fields)
