"""The contracts of both kinds; steps of the optimizer and factors of the schedule, worked by hand."""

from __future__ import annotations

import pytest
import torch
from grpox.testing import OptimizerConformance, SchedulerConformance

from grpox_ademamix.config import AdEMAMixConfig, CooldownConfig
from grpox_ademamix.optimizer import AdEMAMix
from grpox_ademamix.scheduler import Cooldown


class TestAdEMAMix(OptimizerConformance):
    component = "ademamix"


class TestCooldown(SchedulerConformance):
    component = "cooldown"


def steps(gradients, **parameters):
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = AdEMAMix(AdEMAMixConfig(epsilon=1e-300, **parameters)).build([weight], 0.1)
    values = []
    for gradient in gradients:
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        values.append(weight.item())
    return values


def test_the_first_step_is_the_learning_rate_and_a_part_of_the_slow_mean():
    # The corrected means of one gradient g are g and g^2: (g + 5 * 0.01 g) / |g| = 1.05.
    assert steps([4.0], beta3=0.99) == pytest.approx([1 - 0.105])


def test_the_slow_mean_goes_on_after_the_gradient_has_turned():
    # beta1 0: the fast mean is the gradient. v is that of squares 1 and 1, so its corrected mean is 1.
    # Slow: 0.5, then 0.5 * 0.5 - 0.5 = -0.25. Steps: 1 + 2 * 0.5 = 2, then -1 + 2 * -0.25 = -1.5.
    weights = steps([1.0, -1.0], beta1=0.0, beta3=0.5, alpha=2.0)
    assert weights == pytest.approx([1 - 0.2, 1 - 0.2 + 0.15])


def test_without_the_slow_mean_it_is_adamw():
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    adamw = torch.optim.AdamW([weight], 0.1, eps=1e-300, weight_decay=0.3)
    expected = []
    for gradient in (1.0, -3.0, 0.5):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        adamw.step()
        expected.append(weight.item())
    assert steps([1.0, -3.0, 0.5], alpha=0.0, weight_decay=0.3) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 0.5),  # 1 of 2
        (1, 1.0),
        (6, 1.0),  # the cooldown takes steps 6 to 10
        (7, 0.5),  # 1 - sqrt(1 / 4)
        (10, 0.0),
    ],
)
def test_the_rate_is_constant_and_then_falls(step, factor):
    assert Cooldown(CooldownConfig(warmup=2, share=0.4)).factor(step, 10) == factor
