"""Observers that break their contract, each in one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpox import hookimpl


class Right:
    """Adds up what it is told."""

    def __init__(self) -> None:
        self.total = 0.0

    @hookimpl
    def grpox_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self.total += metrics["reward"]


class WantsMore(Right):
    @hookimpl
    def grpox_run_started(self, run: Any) -> None:
        raise OSError("no such server")


class DividesByRewards(Right):
    @hookimpl
    def grpox_rollouts_scored(self, rollouts: Sequence[Any]) -> None:
        self.total += sum(value for scored in rollouts for value in scored.rewards.values())


class FailsOnFailure(Right):
    @hookimpl
    def grpox_run_failed(self, error: BaseException) -> None:
        self.total /= len(error.args[0])


class FormatsIntegers(Right):
    @hookimpl
    def grpox_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self.total += int(metrics["reward"])
