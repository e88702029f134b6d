"""Components with state that break its contract, each in one way."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction


class RightQuantile:
    """A loss with a running quantile of ratios."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    statistics: ClassVar[dict[str, str]] = {"ratio": "gather", "reward": "mean"}

    def __init__(self) -> None:
        self.cap, self.mean = torch.tensor(1.0), 0.0

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        return LossOutput(-torch.minimum(ratio, self.cap.to(ratio)) * inputs.advantages * (1 + self.mean))

    def end_step(self, statistics: dict[str, Any]) -> None:
        ratios = statistics["ratio"]
        if len(ratios) and bool(ratios.isfinite().all()):
            self.follow(statistics)

    def follow(self, statistics: dict[str, Any]) -> None:
        self.cap = 0.5 * self.cap + 0.5 * statistics["ratio"].quantile(0.9)
        self.mean = 0.5 * self.mean + 0.5 * statistics["reward"]

    def state_dict(self) -> dict[str, Any]:
        return {"cap": self.cap, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cap, self.mean = state["cap"], state["mean"]


class LoadsNothing(RightQuantile):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SavesNumpy(RightQuantile):
    def state_dict(self) -> dict[str, Any]:
        return {"cap": self.cap, "mean": np.float64(self.mean)}


class FailsOnNothing(RightQuantile):
    """Takes a quantile of no values."""

    def end_step(self, statistics: dict[str, Any]) -> None:
        if not bool(statistics["ratio"].isnan().any()):
            self.follow(statistics)


class CountsTokens(RightQuantile):
    """Changes its state by the rows that a rank has."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.mean += float(inputs.token_mask.sum())
        return super().per_token(inputs)


class RightRunningStd:
    """An advantage with a running standard deviation."""

    def __init__(self) -> None:
        self.std = 1.0

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        totals = (rewards * weights).nansum(dim=1)
        self.std = 0.9 * self.std + 0.1 * float(totals.std())
        return (totals - totals.mean()) / (self.std + 1e-4)

    def state_dict(self) -> dict[str, Any]:
        return {"std": self.std}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.std = state["std"]


class Rounds(RightRunningStd):
    """Saves less than it goes by."""

    def state_dict(self) -> dict[str, Any]:
        return {"std": round(self.std, 3)}


class RightReward:
    """A reward that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        return [len(text) / self.calls for text in completions]

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class LoadsOther(RightReward):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"] + 1


class RightSchedule:
    """A correction whose cap follows the steps."""

    stateless = True
    cap = 4.0

    def begin_step(self, context: Any) -> None:
        self.cap = 4.0 - context.step / context.total_steps

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(old - sampler).clamp(max=self.cap), torch.ones_like(mask)
