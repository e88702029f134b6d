"""Two prompts of three completions from rewards to loss, with exact and with rounded advantages."""

from __future__ import annotations

import pytest
import torch

from grpox.contracts import LossInputs
from grpox_advantages.configs import GroupConfig
from grpox_advantages.scalers import Group
from grpox_losses.configs import CispoConfig
from grpox_losses.losses import Cispo

LOGPROBS = [[-2.30, -1.20, -1.61], [-1.39, -1.39, -1.39]]


def mean_losses(advantages: torch.Tensor) -> list[float]:
    """`-(1/3) sum log p * A` of each prompt: cispo at w = 1, each completion as one token."""
    logprobs = torch.tensor(LOGPROBS).reshape(6, 1)
    inputs = LossInputs(
        logprobs, logprobs.clone(), advantages.reshape(6, 1), torch.ones(6, 1, dtype=torch.bool)
    )
    return Cispo(CispoConfig()).per_token(inputs).loss.reshape(2, 3).mean(dim=1).tolist()


def test_advantages() -> None:
    rewards = torch.tensor([[2.0], [1.0], [1.0], [1.0], [1.0], [1.0]])

    advantages = Group(GroupConfig(eps=0.0, ddof=0)).scale(
        rewards, torch.ones(1), torch.tensor([0, 0, 0, 1, 1, 1])
    )

    assert advantages[:3].tolist() == pytest.approx([1.41421, -0.70711, -0.70711], abs=5e-6)
    assert advantages[3:].tolist() == [0.0, 0.0, 0.0]

    first, second = mean_losses(advantages)
    # -(-2.30 * 1.41421 + 1.20 * 0.70711 + 1.61 * 0.70711) / 3
    assert first == pytest.approx(0.4219, abs=5e-5)
    assert second == 0.0
    assert (first + second) / 2 == pytest.approx(0.2110, abs=5e-5)


def test_advantages_rounded_to_two_digits_give_another_loss() -> None:
    first, second = mean_losses(torch.tensor([1.41, -0.70, -0.70, 0.0, 0.0, 0.0]))

    # -(-3.243 + 0.84 + 1.127) / 3 = 0.42533; the mean of 0.425 and 0 is 0.2125.
    assert round(first, 3) == 0.425
    assert second == 0.0
    assert (round(first, 3) + second) / 2 == 0.2125
