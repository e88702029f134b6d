"""An optimizer and a dataset as a researcher writes them from the documentation alone, for whole runs."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import Any

import datasets
import torch
from pydantic import BaseModel, Field

from grpox.contracts import InputPath


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
