"""Losses as a researcher writes them from the documentation alone, each a class given by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction


def _log_ratio(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20)


def _sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True)


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    return _sequence_sum(values, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1)


class GspoToken:
    """GSPO-token (arXiv 2507.18071, eq. 13 to 16): `sg[s_i] pi / sg[pi]`, clipped."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    gradient = "surrogate"
    zero_at_zero_advantage = True

    class Config(BaseModel):
        low: float = Field(3e-4, gt=0)
        high: float = Field(4e-4, gt=0)

    def __init__(self, config: Config) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = self._ratio(inputs) * (inputs.logprobs - inputs.logprobs.detach()).exp()
        bounded = ratio.clamp(1 - self.config.low, 1 + self.config.high)
        return LossOutput(-torch.min(ratio * inputs.advantages, bounded * inputs.advantages))

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        ratio, advantages = self._ratio(inputs).expand_as(inputs.logprobs), inputs.advantages
        above, below = ratio > 1 + self.config.high, ratio < 1 - self.config.low
        return torch.where((above & (advantages > 0)) | (below & (advantages < 0)), 0.0, -ratio * advantages)

    def _ratio(self, inputs: LossInputs) -> Tensor:
        return _sequence_mean(_log_ratio(inputs), inputs.token_mask).exp().detach()


class Gmpo:
    """GMPO (arXiv 2507.20673, eq. 5): the geometric mean of ratios that are clipped on one side."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    zero_at_zero_advantage = True

    class Config(BaseModel):
        clip: float = Field(0.4, gt=0)

    def __init__(self, config: Config) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        log_ratio, clip = _log_ratio(inputs), self.config.clip
        clipped = torch.where(inputs.advantages > 0, log_ratio.clamp(max=clip), log_ratio.clamp(min=-clip))
        return LossOutput(-_sequence_mean(clipped, inputs.token_mask).exp() * inputs.advantages)


class QuantileClip:
    """Clipped surrogate whose bounds follow the quantiles of the ratios of the steps before."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    statistics: ClassVar[Mapping[str, Any]] = {"ratio": "gather"}
    zero_at_zero_advantage = True

    class Config(BaseModel):
        share: float = Field(0.05, gt=0, lt=0.5)
        """Share of the ratios that is beyond each bound."""
        decay: float = Field(0.5, ge=0, lt=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.low, self.high = 0.8, 1.2

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = _log_ratio(inputs).exp(), inputs.advantages
        loss = -torch.min(ratio * advantages, ratio.clamp(self.low, self.high) * advantages)
        return LossOutput(loss, {"quantile/high": torch.full_like(loss, self.high)})

    def end_step(self, statistics: Mapping[str, Any]) -> None:
        ratios = statistics["ratio"].double()
        if not len(ratios) or not bool(ratios.isfinite().all()):
            return
        decay, share = self.config.decay, self.config.share
        self.low = decay * self.low + (1 - decay) * min(0.99, float(ratios.quantile(share)))
        self.high = decay * self.high + (1 - decay) * max(1.01, float(ratios.quantile(1 - share)))

    def state_dict(self) -> Mapping[str, Any]:
        return {"low": self.low, "high": self.high}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.low, self.high = state["low"], state["high"]


class ReferencePenalty:
    """Policy gradient with the KL estimate k2 to the reference inside the loss."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    needs = ("reference_logprobs",)

    class Config(BaseModel):
        weight: float = Field(0.05, ge=0)

    def __init__(self, config: Config) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.reference_logprobs is not None
        penalty = (inputs.reference_logprobs - inputs.logprobs).square() / 2
        loss = -_log_ratio(inputs).exp() * inputs.advantages + self.config.weight * penalty
        return LossOutput(loss, {"reference/k2": penalty})


class EntropyRegularised:
    """Policy gradient with an entropy bonus inside the loss."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    needs = ("entropy_gradient",)

    class Config(BaseModel):
        weight: float = Field(0.01, ge=0)

    def __init__(self, config: Config) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.entropy is not None
        gradient = -_log_ratio(inputs).exp() * inputs.advantages
        return LossOutput(gradient - self.config.weight * inputs.entropy)


class RewardWeighted:
    """Reward-weighted regression: likelihood of each completion, weighted by exp(r / temperature)."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    sign = "other"
    needs = ("rewards",)

    class Config(BaseModel):
        temperature: float = Field(1.0, gt=0)

    def __init__(self, config: Config) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.rewards is not None
        scored = ~inputs.rewards.isnan().all(dim=1)
        weights = (inputs.rewards.nansum(dim=1) / self.config.temperature).clamp(max=20).exp()
        return LossOutput(-torch.where(scored, weights, 0.0).unsqueeze(1).to(inputs.logprobs) * inputs.logprobs)


class PairsOfAGroup:
    """Pairwise preference in a group: -log sigmoid(s_i - s_j) for each completion j that is worse than i.

    s_i is the sum of the log-ratios of completion i; better and worse is by advantage.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    scope = "group"
    sign = "other"
    needs = ("group_ids",)

    class Config(BaseModel):
        beta: float = Field(0.1, gt=0)

    def __init__(self, config: Config) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.group_ids is not None
        scores = _sequence_sum(_log_ratio(inputs), inputs.token_mask).squeeze(1)  # f32[B]
        quality = _sequence_mean(inputs.advantages, inputs.token_mask).squeeze(1)  # f32[B]
        same = inputs.group_ids[:, None] == inputs.group_ids[None, :]
        better = same & (quality[:, None] > quality[None, :])  # bool[B, B]
        margins = self.config.beta * (scores[:, None] - scores[None, :])
        losses = torch.where(better, -torch.nn.functional.logsigmoid(margins), 0.0).sum(dim=1)
        return LossOutput(losses.unsqueeze(1).expand_as(inputs.logprobs))
