"""Metrics of a step: means over tokens, extremes over tokens or micro-batches, and the sampling mismatch."""

import math

import pytest
import torch

from grpox.contracts import Rollout
from grpox.metrics import PhaseTimes, TokenMetrics
from grpox.mismatch import add_mismatch, mismatch_metrics
from grpox.rollout import collate
from grpox.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


def test_means_weigh_tokens_not_micro_batches():
    metrics = TokenMetrics()
    metrics.add("x", torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]))
    metrics.add("x", torch.tensor([[6.0, 9.0, 9.0]]), torch.tensor([[True, False, False]]))
    assert metrics.reduce(ALONE)["x"] == (3, 1, 6)


def test_micro_batch_extremes_are_of_their_means():
    metrics = TokenMetrics()
    everywhere = torch.ones(1, 2, dtype=torch.bool)
    metrics.add_micro_batch("x", torch.tensor([[0.0, 1.0]]), everywhere)
    metrics.add_micro_batch("x", torch.tensor([[1.0, 1.0]]), everywhere)
    assert metrics.reduce(ALONE)["x"] == (0.75, 0.5, 1)


def test_a_step_without_tokens_has_no_metric_rather_than_nan():
    metrics = TokenMetrics()
    metrics.add("x", torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    metrics.add_micro_batch("y", torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    assert metrics.reduce(ALONE) == {}


def test_mismatch_by_hand():
    """Ratios 1/2 and 2 on two tokens; a third token is masked."""
    batch = collate([Rollout(0, 0, (1,), (2, 3), "stop", 0, (-1.0, -1.0))], [1.0], 0, CPU)
    metrics = TokenMetrics()
    add_mismatch(metrics, torch.tensor([[-math.log(2), math.log(2)]]), batch)
    found = mismatch_metrics(metrics.reduce(ALONE))
    ln2 = math.log(2)
    assert found == pytest.approx(
        {
            "sampling/ratio_mean": 1.25,
            "sampling/ratio_min": 0.5,
            "sampling/ratio_max": 2.0,
            # (0.5 + 2)^2 / (2 * (0.25 + 4))
            "sampling/effective_sample_size": 6.25 / 8.5,
            "sampling/difference_mean": ln2,
            "sampling/difference_max": ln2,
            # mean of (1/2 - 1 + ln 2) and (2 - 1 - ln 2)
            "sampling/kl": 0.25,
            "sampling/missing_logprobs": 0.0,
        }
    )


def test_phase_times_start_over_when_taken():
    times = PhaseTimes()
    with times.phase("update"):
        pass
    with times.phase("update"):
        pass
    assert list(times.take()) == ["time/update"]
    assert times.take() == {}
