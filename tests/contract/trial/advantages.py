"""Advantages as a researcher writes them from the documentation alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from grpox.contracts import AdvantageInputs
from grpox.toolkit import weighted_sum


def _groups(group_ids: Tensor) -> list[Tensor]:
    return [group_ids == group for group in group_ids.unique()]


class Rloo:
    """RLOO (arXiv 2402.14740): the reward less the mean of the others of its group."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total = weighted_sum(rewards, weights)  # f64[N]
        result = torch.zeros_like(total)
        for group in _groups(group_ids):
            rows = group & ~total.isnan()
            count = int(rows.sum())
            if count > 1:
                result[rows] = (total[rows] - total[rows].mean()) * count / (count - 1)
        return result.float()


class RunningStd:
    """The reward less its group's mean, over a running standard deviation of these differences."""

    class Config(BaseModel):
        decay: float = Field(0.9, ge=0, lt=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.square, self.batches = 0.0, 0

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        total = weighted_sum(inputs.rewards, inputs.weights)
        centred = torch.zeros_like(total)
        for group in _groups(inputs.group_ids):
            rows = group & ~total.isnan()
            if rows.any():
                centred[rows] = total[rows] - total[rows].mean()
        scored = ~total.isnan()
        if scored.any():
            self.batches += 1
            mean = float(centred[scored].square().mean())
            self.square = self.config.decay * self.square + (1 - self.config.decay) * mean
        weight = 1 - self.config.decay**self.batches
        std = (self.square / weight) ** 0.5 if weight else 0.0
        return (centred / (std + 1e-4)).float()

    def state_dict(self) -> Mapping[str, Any]:
        return {"square": self.square, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.square, self.batches = state["square"], state["batches"]


class QuantileBaseline:
    """The reward less a quantile of its group."""

    class Config(BaseModel):
        quantile: float = Field(0.75, ge=0, le=1)

    def __init__(self, config: Config) -> None:
        self.config = config

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total = weighted_sum(rewards, weights)
        result = torch.zeros_like(total)
        for group in _groups(group_ids):
            rows = group & ~total.isnan()
            # A group whose rewards are equal teaches nothing.
            if rows.any():
                result[rows] = total[rows] - total[rows].quantile(self.config.quantile)
        return result.float()


class ByDifficulty:
    """The reward less its group's mean, times the difficulty that a column of the data has."""

    class Config(BaseModel):
        column: str = "difficulty"

    def __init__(self, config: Config) -> None:
        self.config = config

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        total = weighted_sum(inputs.rewards, inputs.weights)
        factors = total.new_tensor([float(value) for value in inputs.columns[self.config.column]])
        result = torch.zeros_like(total)
        for group in _groups(inputs.group_ids):
            rows = group & ~total.isnan()
            if rows.any():
                result[rows] = total[rows] - total[rows].mean()
        return (result * factors).float()


class RewardToGo:
    """The rewards of a token and of those after it, less their mean over the group's completions.

    Without rewards of tokens, the reward of the completion is that of its last token.
    """

    per = "token"

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:
        total = weighted_sum(inputs.rewards, inputs.weights)
        togo = [self._to_go(inputs, row, float(reward)) for row, reward in enumerate(total.nan_to_num())]
        result: list[Tensor] = [torch.zeros(0)] * len(total)
        for group in _groups(inputs.group_ids):
            rows = group.nonzero().flatten().tolist()
            scored = [row for row in rows if not total[row].isnan()]
            baseline = sum(float(total[row]) for row in scored) / max(1, len(scored))
            for row in rows:
                known = togo[row] - baseline if row in scored else torch.zeros_like(togo[row])
                result[row] = torch.where(inputs.model_masks[row], known, 0.0).float()
        return result

    def _to_go(self, inputs: AdvantageInputs, row: int, reward: float) -> Tensor:
        rewards = torch.zeros(len(inputs.model_masks[row]), dtype=torch.float64)
        if inputs.token_rewards:
            for of_function in inputs.token_rewards.values():
                rewards += of_function[row].double().nan_to_num().cpu()
        elif len(rewards):
            rewards[-1] = reward
        return rewards.flip(0).cumsum(0).flip(0).to(inputs.rewards.device)
