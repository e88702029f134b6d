"""Components with state that break its contract, each in one way."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from grpox.contracts import LossInputs, LossOutput, Reduction


class FailsOnNothing:
    """A loss with a running quantile of ratios, also of no values."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    statistics: ClassVar[dict[str, str]] = {"ratio": "gather", "reward": "mean"}

    def __init__(self) -> None:
        self.cap, self.mean = torch.tensor(1.0), 0.0

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        return LossOutput(-torch.minimum(ratio, self.cap.to(ratio)) * inputs.advantages * (1 + self.mean))

    def end_step(self, statistics: dict[str, Any]) -> None:
        if not bool(statistics["ratio"].isnan().any()):
            self.cap = 0.5 * self.cap + 0.5 * statistics["ratio"].quantile(0.9)
            self.mean = 0.5 * self.mean + 0.5 * statistics["reward"]

    def state_dict(self) -> dict[str, Any]:
        return {"cap": self.cap, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cap, self.mean = state["cap"], state["mean"]


class Right(FailsOnNothing):
    def end_step(self, statistics: dict[str, Any]) -> None:
        if len(statistics["ratio"]) and bool(statistics["ratio"].isfinite().all()):
            super().end_step(statistics)


class CountsTokens(Right):
    """Changes its state by the rows that a rank has."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.mean += float(inputs.token_mask.sum())
        return super().per_token(inputs)


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
