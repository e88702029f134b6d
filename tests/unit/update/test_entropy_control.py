"""The adaptive entropy coefficient: its rule on numbers, and steps with the weights that it sets."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support.small_models import gradient_of
from test_packing import micro_batches_of
from test_policy_terms import small_model, step_of, update

from grpox.config import AdaptiveEntropyConfig
from grpox.update.entropy_control import EntropyControl, EntropyControlState

BOUNDS = {"target": 0.5, "delta": 0.1, "min": 0.05, "max": 0.25}
# Entropy of a step, the weight of its bonus, the coefficient after it: by hand, and the same numbers from
# `GRPOTrainer._compute_loss` of TRL 1.16.0 with these bounds and entropy_coef 0.1.
COURSE = (
    (0.9, 0.0, 0.05),  # nothing is known of the entropy before the first step; 0.1 - 0.1 is below min
    (0.5, 0.0, 0.15),  # at the target counts as below it
    (0.4, 0.15, 0.25),
    (0.3, 0.25, 0.25),
    (0.2, 0.25, 0.25),
    (0.6, 0.25, 0.15),
    (0.4, 0.0, 0.25),
    (0.7, 0.25, 0.15),
    (0.8, 0.0, 0.05),
    (0.8, 0.0, 0.05),
)
HIGH = {"target": 100.0, "delta": 0.25}
"""Every entropy is below this target."""


def control() -> EntropyControl:
    return EntropyControl(AdaptiveEntropyConfig.model_validate(BOUNDS), 0.1)


def test_the_coefficient_follows_the_entropy_as_in_trl() -> None:
    following, seen = control(), []
    for entropy, *_ in COURSE:
        weight = following.weight
        following.see(entropy)
        seen.append((entropy, weight, following.state.coefficient))
    assert seen == [pytest.approx(row, abs=1e-12) for row in COURSE]


def test_a_restored_control_goes_on_bit_by_bit() -> None:
    whole, first, second = control(), control(), control()
    for entropy, *_ in COURSE[:4]:
        whole.see(entropy)
        first.see(entropy)
    second.state = EntropyControlState.model_validate_json(first.state.model_dump_json())
    for entropy, *_ in COURSE[4:]:
        whole.see(entropy)
        second.see(entropy)
        assert (second.weight, second.state) == (whole.weight, whole.state)


@pytest.mark.parametrize("chunked", [True, False])
def test_each_step_has_the_gradient_of_the_weight_that_the_step_before_chose(chunked: bool) -> None:
    """Bit by bit that of a constant coefficient, also for completions whose advantage is 0."""
    micro_batches, model = micro_batches_of(21), small_model()
    settings: dict[str, Any] = {"chunked_logprobs": chunked}
    taken = update(model, "grpo", entropy_coef=0.1, adaptive_entropy=HIGH, **settings)
    plain = step_of(micro_batches, "grpo", **settings)[1]
    for weight, after in ((0.0, 0.35), (0.35, 0.6), (0.6, 0.85)):
        model.zero_grad()
        metrics = taken.step(copy.deepcopy(micro_batches))
        constant = {"entropy_coef": weight} if weight else {"skip_zero_advantage": False}
        expected, of_constant = step_of(micro_batches, "grpo", **constant, **settings)
        assert torch.equal(gradient_of(model), expected)
        assert metrics["entropy_coef"] == pytest.approx(weight, abs=1e-12)
        assert metrics["adaptive_entropy/coef"] == pytest.approx(after, abs=1e-12)
        assert metrics["loss"] == of_constant["loss"]
        assert metrics["policy_loss"] == pytest.approx(plain["loss"], rel=1e-6)


def test_a_step_that_is_not_taken_does_not_move_the_coefficient() -> None:
    micro_batches = micro_batches_of(22)
    micro_batches[0][0].advantage = math.nan
    taken = update(small_model(), "grpo", adaptive_entropy=HIGH, on_nonfinite="skip")
    engine: Any = taken.engine
    engine.discard = lambda: None
    metrics = taken.step(micro_batches)
    assert metrics["skipped_steps"] == 1
    assert taken.entropy_control is not None
    assert taken.entropy_control.state == EntropyControlState(coefficient=0.0)


def test_the_dump_of_a_step_has_the_weight_of_that_step() -> None:
    micro_batches, broken = micro_batches_of(23), micro_batches_of(23)
    broken[0][0].advantage = math.nan
    taken = update(small_model(), "grpo", entropy_coef=0.1, adaptive_entropy=HIGH, on_nonfinite="skip")
    engine: Any = taken.engine
    engine.discard = lambda: None
    dumped: list[Any] = []

    def dump(*arguments: Any) -> str:
        dumped.append(arguments[-1])
        return ""

    taken.nonfinite.dump = dump
    taken.step(micro_batches)
    taken.step(broken)
    assert dumped == [{"beta": 0.0, "entropy_coef": 0.35}]
