"""Components as a researcher writes them from the documentation alone, for whole runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from urllib.request import Request, urlopen

import datasets
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from grpox.contracts import InputPath, LossInputs, LossOutput, Reduction, Text, completion_text
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


class IcePop:
    """IcePop (arXiv 2510.18855): tokens with low <= pi_old / mu <= high, weighed by that ratio."""

    needs = ("logprobs",)

    class Config(BaseModel):
        low: float = Field(0.5, gt=0, le=1)
        high: float = Field(5.0, ge=1)

    def __init__(self, config: Config) -> None:
        self.config = config

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp()
        keep = (ratio >= self.config.low) & (ratio <= self.config.high)
        return torch.where(keep, ratio, 0.0), keep


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


class Judge:
    """Score of a judge behind HTTP, which answers {"text": ...} by {"score": ...}; it fails if that does."""

    class Config(BaseModel):
        url: str
        seconds: float = 10.0

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self._ask, map(completion_text, completions)))

    def _ask(self, text: str) -> float:
        body = json.dumps({"text": text}).encode()
        request = Request(self.config.url, body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=self.config.seconds) as answer:
            return float(json.load(answer)["score"])


class _Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[Any], lr: float, first: float, second: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "first": first, "second": second, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                direction = momentum.lerp(parameter.grad, 1 - group["first"]).sign()
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - group["second"])


class Lion:
    """Lion (arXiv 2302.06675)."""

    class Config(BaseModel):
        beta1: float = Field(0.9, ge=0, lt=1)
        beta2: float = Field(0.99, ge=0, lt=1)
        weight_decay: float = Field(0.0, ge=0)

    def __init__(self, config: Config) -> None:
        self.config = config

    def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        config = self.config
        return _Lion(parameters, learning_rate, config.beta1, config.beta2, config.weight_decay)


class FromCsv:
    """Rows of a CSV file with a header."""

    class Config(BaseModel):
        file: InputPath

    def __init__(self, config: Config) -> None:
        self.config = config

    def load(self) -> datasets.Dataset:
        with open(self.config.file, encoding="utf-8", newline="") as file:
            return datasets.Dataset.from_list(list(csv.DictReader(file)))
