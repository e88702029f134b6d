"""Statistics of a step: numbers worked by hand, the order of rows on one rank and two, and refused names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpox.checkpoint.components import RunComponents
from grpox.contracts import Rollout
from grpox.data.schedule import MicroBatchPlan, StepPlan
from grpox.errors import RunFailed
from grpox.policy.batch import Sample, collate, samples_of
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.update.objective import MicroBatchLoss, build_inputs
from grpox.update.step_statistics import StepStatistics
from grpox.update.token_metrics import measure
from grpox_corrections.corrections import NoCorrection

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


def samples() -> list[Sample]:
    """Four completions of 1, 3, 2 and 2 tokens; one token of the second and all of the last are masked."""
    lengths, masks = (1, 3, 2, 2), (None, (True, False, True), None, (False, False))
    rows = [
        Rollout(0, row, (1,), tuple(range(2, 2 + length)), "stop", 0, model_mask=mask)
        for row, (length, mask) in enumerate(zip(lengths, masks, strict=True))
    ]
    made = samples_of(rows, [1.0, -1.0, 0.5, 2.0])
    for sample, reward in zip(made, (1.0, 0.0, math.nan, 5.0), strict=True):
        sample.reward = reward
    return made


def scored(together: list[Sample], first: list[float]) -> Any:
    """A micro-batch whose token t of a row has the ratio first[row] + t / 10."""
    batch = collate(together, CPU)
    width = batch.token_mask.shape[1]
    ratio = torch.tensor(first).unsqueeze(1) + torch.arange(width) / 10
    zeros, mask = torch.zeros_like(ratio), batch.token_mask
    inputs = build_inputs(zeros, mask, batch.advantages, entropy=torch.full_like(ratio, 2.0))
    diagnostics = {"ratio": ratio, "kl_old": ratio}
    return batch, MicroBatchLoss(inputs, zeros.sum(), zeros, diagnostics, {}, correction=(zeros + 1, mask))


def plan(iterations: tuple[int, ...] = (0, 0)) -> StepPlan:
    """Two micro-batches of two rows on one rank."""
    return StepPlan(
        1, tuple(MicroBatchPlan(0, it, range(2 * n, 2 * n + 2), 2) for n, it in enumerate(iterations))
    )


def record(statistics: StepStatistics, results: Any) -> None:
    """Record a step as the update does."""
    if names := statistics.names(results):
        values = measure(results, NoCorrection(), names).requested
        assert values is not None
        statistics.record(names, results, values)


def reduced(*wanted: tuple[str, Any]) -> dict[Any, Any]:
    """The statistics of a step that was packed in another order than its rows."""
    rows = samples()
    statistics = StepStatistics(dict.fromkeys(wanted, "loss 'mine'"))
    record(statistics, [scored([rows[2], rows[1]], [3.0, 2.0]), scored([rows[3], rows[0]], [4.0, 1.0])])
    return dict(statistics.reduce(plan(), [rows[:2], rows[2:]], ALONE))


def test_gathered_values_are_in_row_order_without_masked_tokens() -> None:
    values = reduced(("ratio", "gather"), ("advantages", "gather"), ("reward", "gather"), ("length", "gather"))
    assert values["ratio", "gather"].dtype == torch.float32
    assert values["ratio", "gather"].tolist() == pytest.approx([1.0, 2.0, 2.2, 3.0, 3.1])
    assert values["advantages", "gather"].tolist() == [1.0, -1.0, -1.0, 0.5, 0.5]
    assert values["length", "gather"].tolist() == [1, 2, 2, 0]  # tokens that the model wrote
    rewards = values["reward", "gather"].tolist()
    assert rewards[:2] == [1.0, 0.0]
    assert math.isnan(rewards[2])


def test_sums_means_and_extremes_are_those_by_hand() -> None:
    values = reduced(
        *(("ratio", reduction) for reduction in ("sum", "mean", "min", "max")),
        *(("reward", reduction) for reduction in ("sum", "mean", "min", "max")),
        ("advantage", "mean"),
    )
    assert values["ratio", "sum"] == pytest.approx(11.3)
    assert values["ratio", "mean"] == pytest.approx(11.3 / 5)
    assert values["ratio", "min"] == pytest.approx(1.0)
    assert values["ratio", "max"] == pytest.approx(3.1)
    assert [values["reward", each] for each in ("sum", "mean", "min", "max")] == [6.0, 2.0, 0.0, 5.0]
    assert values["advantage", "mean"] == 0.625


def test_nothing_has_the_sum_0_and_no_mean() -> None:
    rows = samples()[3:]
    wanted: Any = {
        ("ratio", "sum"): "a",
        ("ratio", "mean"): "a",
        ("ratio", "min"): "a",
        ("ratio", "gather"): "a",
    }
    statistics = StepStatistics(wanted)
    record(statistics, [scored(rows, [4.0])])
    one = StepPlan(1, (MicroBatchPlan(0, 0, range(1), 1),))
    values = statistics.reduce(one, [rows], ALONE)
    assert values["ratio", "sum"] == 0.0
    assert math.isnan(values["ratio", "mean"])  # type: ignore[arg-type]
    assert math.isnan(values["ratio", "min"])  # type: ignore[arg-type]
    assert len(values["ratio", "gather"]) == 0  # type: ignore[arg-type]


def test_a_row_of_two_iterations_comes_twice_in_their_order() -> None:
    rows = samples()[:2]
    statistics = StepStatistics({("length", "gather"): "a"})
    twice = StepPlan(1, tuple(MicroBatchPlan(0, iteration, range(2), 2) for iteration in (1, 0)))
    values = statistics.reduce(twice, [rows, rows], ALONE)
    assert values["length", "gather"].tolist() == [1, 2, 1, 2]  # type: ignore[union-attr]


def test_an_unknown_name_is_refused_with_its_asker_and_the_nearest() -> None:
    statistics = StepStatistics({("ratioo", "mean"): "loss 'mine'"})
    with pytest.raises(RunFailed, match=r"loss 'mine' asks for the statistic 'ratioo'.*did you mean 'ratio'"):
        record(statistics, [scored(samples(), [0.0] * 4)])


def test_a_name_that_a_diagnostic_takes_is_refused() -> None:
    batch, result = scored(samples(), [0.0] * 4)
    result.diagnostics["length"] = result.diagnostics["ratio"]
    with pytest.raises(RunFailed, match="'length', which is a diagnostic of the loss too"):
        StepStatistics({("length", "mean"): "a", ("ratio", "mean"): "a"}).names([(batch, result)])


def test_nothing_is_sent_if_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    components = RunComponents(nothing, ALONE, PhaseTimes())
    components.complete(nothing, beta=0.0)
    monkeypatch.setattr(World, "gather", nothing)
    components.end_step(plan(), [])
    assert components.statistics.names([nothing]) == []
