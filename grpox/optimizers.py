"""The optimizer and schedules that need no plugin: AdamW, and transformers' schedules by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from grpox.config import TrainConfig


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101); biases and norms are not decayed, as in transformers."""

    config: TrainConfig

    def build(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter.requires_grad:
                (decayed if parameter.ndim >= 2 else plain).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=learning_rate,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            eps=self.config.adam_epsilon,
        )


@dataclass(frozen=True)
class NamedSchedule:
    """One of transformers' learning-rate schedules, with linear warm-up."""

    config: TrainConfig

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return get_scheduler(
            self.config.lr_scheduler_type,
            optimizer,
            num_warmup_steps=self.config.warmup_steps,
            num_training_steps=total_steps,
        )
