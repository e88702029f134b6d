"""The optimizer and schedules that need no plugin: AdamW, and transformers' schedules by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from grpox.config import TrainConfig
from grpox.errors import ConfigError
from grpox.runfile.lr_schedules import schedule_arguments, step_problems


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), without decay of biases and norms, as in
    transformers."""

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
            # Unset, PyTorch chooses by device; False would also rule out its faster loop over all tensors.
            fused=True if self.config.optim == "adamw_torch_fused" else None,
        )


@dataclass(frozen=True)
class NamedSchedule:
    """One of transformers' learning-rate schedules, with its warm-up."""

    config: TrainConfig

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        """Build the schedule over `total_steps` optimizer steps.

        Raises:
            ConfigError: the schedule needs more steps.
        """
        warmup_steps = warmup_steps_of(self.config, total_steps)
        if problems := step_problems(self.config, warmup_steps, total_steps):
            raise ConfigError(problems)
        return get_scheduler(
            self.config.lr_scheduler_type,
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=schedule_arguments(self.config),
        )


def warmup_steps_of(config: TrainConfig, total_steps: int) -> int:
    """Return the number of warm-up steps; a ratio is rounded up, as in transformers."""
    return config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
