"""Observers that act on the run, as a researcher writes them from the documentation alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from grpox import hookimpl
from grpox.contracts import Control


class Patience:
    """Ends a run whose reward has not risen for some steps."""

    class Config(BaseModel):
        steps: int = Field(3, ge=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.best, self.since = float("-inf"), 0

    @hookimpl
    def grpox_step_finished(self, step: int, metrics: Mapping[str, float], control: Control) -> None:
        reward = metrics.get("reward", float("nan"))
        self.since += 1
        if reward > self.best:
            self.best, self.since = reward, 0
        if self.since >= self.config.steps:
            control.stop(f"no better reward for {self.since} steps")

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.since = state["best"], state["since"]


class TargetKl:
    """Doubles or halves beta so that the KL to the reference stays near a target, as PPO's adaptive penalty."""

    class Config(BaseModel):
        target: float = Field(0.01, gt=0)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def grpox_step_finished(self, metrics: Mapping[str, float], control: Control) -> None:
        distance, beta = metrics.get("kl", 0.0), control.hyperparameters.get("beta")
        if beta is None:  # the run has no reference
            return
        if distance > 1.5 * self.config.target:
            control.set("beta", 2 * beta)
        elif distance < self.config.target / 1.5:
            control.set("beta", beta / 2)
