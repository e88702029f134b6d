"""Metrics of a step: means over tokens, extremes over tokens or micro-batches, and the times of phases."""

import torch

from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.update.token_metrics import TokenMetrics, places_of

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
NOWHERE = torch.zeros(0, dtype=torch.int64)


def test_means_weigh_tokens_not_micro_batches():
    metrics = TokenMetrics()
    metrics.add({"x": torch.tensor([[1.0, 2.0, 9.0]])}, torch.tensor([0, 1]))
    metrics.add({"x": torch.tensor([[6.0, 9.0, 9.0]])}, torch.tensor([0]))
    assert metrics.reduce(ALONE)["x"] == (3, 1, 6)


def test_micro_batch_extremes_are_of_their_means():
    metrics = TokenMetrics()
    metrics.add({"x": torch.tensor([[0.0, 1.0]])}, of_means=True)
    metrics.add({"x": torch.tensor([[1.0, 1.0]])}, of_means=True)
    assert metrics.reduce(ALONE)["x"] == (0.75, 0.5, 1)


def test_a_step_without_tokens_has_no_metric_rather_than_nan():
    metrics = TokenMetrics()
    metrics.add({"x": torch.ones(1, 2)}, NOWHERE)
    metrics.add({"y": torch.ones(1, 2)}, NOWHERE, of_means=True)
    assert metrics.reduce(ALONE) == {}


def test_names_that_are_added_together_are_reduced_apart():
    metrics = TokenMetrics()
    metrics.add({"x": torch.tensor([[1.0, 2.0]]), "y": torch.tensor([[5.0, 3.0]])})
    assert metrics.reduce(ALONE) == {"x": (1.5, 1, 2), "y": (4, 3, 5)}
    assert TokenMetrics().reduce(ALONE) == {}


def test_places_are_where_the_mask_is_true():
    assert places_of(torch.tensor([[True, False], [False, True]])).tolist() == [0, 3]


def test_phase_times_start_over_when_taken():
    times = PhaseTimes()
    with times.phase("update"):
        pass
    with times.phase("update"):
        pass
    assert list(times.take()) == ["time/update"]
    assert times.take() == {}


def test_a_passenger_comes_to_the_host_with_the_metrics_and_changes_none():
    one, other = TokenMetrics(), TokenMetrics()
    for metrics in (one, other):
        metrics.add({"x": torch.tensor([[0.1, 0.7]])})
    values = torch.tensor([[0.1, float("nan"), -2.5]], dtype=torch.float32)
    one.passenger = values
    assert one.reduce(ALONE) == other.reduce(ALONE)
    assert torch.equal(one.passenger.float().nan_to_num(7.0), values.nan_to_num(7.0))
    nothing = TokenMetrics()
    nothing.passenger = values
    assert nothing.reduce(ALONE) == {}
    assert nothing.passenger.shape == values.shape
