"""Metrics of a step: means over tokens, extremes over tokens or micro-batches, and the times of phases."""

import torch

from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.update.token_metrics import TokenMetrics, read_together

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


def reduced(metrics):
    return metrics.named(metrics.reduce(ALONE))


def test_means_weigh_tokens_not_micro_batches():
    metrics = TokenMetrics()
    metrics.add("x", torch.tensor([[1.0, 2.0]]))
    metrics.add("x", torch.tensor([[6.0]]))
    assert reduced(metrics)["x"] == (3, 1, 6)


def test_micro_batch_extremes_are_of_their_means():
    metrics = TokenMetrics()
    metrics.add("x", torch.tensor([[0.0, 1.0]]), of_means=True)
    metrics.add("x", torch.tensor([[1.0, 1.0]]), of_means=True)
    assert reduced(metrics)["x"] == (0.75, 0.5, 1)


def test_a_step_without_tokens_has_no_metric_rather_than_nan():
    metrics = TokenMetrics()
    metrics.add("x", torch.ones(1, 0))
    metrics.add("y", torch.ones(1, 0), of_means=True)
    assert reduced(metrics) == {}


def test_names_that_are_added_together_are_reduced_apart():
    metrics = TokenMetrics()
    metrics.add("xy", torch.tensor([[1.0, 2.0], [5.0, 3.0]]))
    assert reduced(metrics) == {"x": (1.5, 1, 2), "y": (4, 3, 5)}
    assert reduced(TokenMetrics()) == {}


def test_tensors_that_are_read_together_keep_their_shapes_and_values():
    values = torch.tensor([[0.1, float("nan"), -2.5]], dtype=torch.float32)
    one, nothing, other = read_together([values, None, torch.tensor(7)])
    assert torch.equal(one.float().nan_to_num(9.0), values.nan_to_num(9.0))
    assert nothing.numel() == 0
    assert other.shape == ()
    assert other.item() == 7


def test_phase_times_start_over_when_taken():
    times = PhaseTimes()
    with times.phase("update"):
        pass
    assert list(times.take()) == ["time/update"]
    assert times.take() == {}
