"""Metrics of a step: means over tokens, extremes over tokens or micro-batches, and the times of phases."""

import torch

from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.update.token_metrics import TokenMetrics

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


def test_means_weigh_tokens_not_micro_batches():
    metrics = TokenMetrics()
    metrics.add({"x": torch.tensor([[1.0, 2.0, 9.0]])}, torch.tensor([[True, True, False]]))
    metrics.add({"x": torch.tensor([[6.0, 9.0, 9.0]])}, torch.tensor([[True, False, False]]))
    assert metrics.reduce(ALONE)["x"] == (3, 1, 6)


def test_micro_batch_extremes_are_of_their_means():
    metrics = TokenMetrics()
    everywhere = torch.ones(1, 2, dtype=torch.bool)
    metrics.add({"x": torch.tensor([[0.0, 1.0]])}, everywhere, of_means=True)
    metrics.add({"x": torch.tensor([[1.0, 1.0]])}, everywhere, of_means=True)
    assert metrics.reduce(ALONE)["x"] == (0.75, 0.5, 1)


def test_a_step_without_tokens_has_no_metric_rather_than_nan():
    metrics = TokenMetrics()
    metrics.add({"x": torch.ones(1, 2)}, torch.zeros(1, 2, dtype=torch.bool))
    metrics.add({"y": torch.ones(1, 2)}, torch.zeros(1, 2, dtype=torch.bool), of_means=True)
    assert metrics.reduce(ALONE) == {}


def test_phase_times_start_over_when_taken():
    times = PhaseTimes()
    with times.phase("update"):
        pass
    with times.phase("update"):
        pass
    assert list(times.take()) == ["time/update"]
    assert times.take() == {}
