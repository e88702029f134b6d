"""Metrics of a step's tokens: means and extremes, and the sampling mismatch, which is always finite.

The mismatch is measured before any cap or mask, at the correction's level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.logs import LoggedText
from support.small_models import model_of
from torch import Tensor

import grpox
from grpox.checkpoint.progress import TrainingState
from grpox.config import RunConfig
from grpox.config.alarms import ALLOWED, FIRST
from grpox.contracts import LossInputs, LossOutput, Rollout
from grpox.errors import RunFailed
from grpox.policy.batch import Sample, collate, samples_of
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.training.step_report import StepReport
from grpox.update.mismatch import first_step_measures, mismatch_warnings
from grpox.update.objective import StepLoss, build_inputs
from grpox.update.packing import StepTotals
from grpox.update.token_metrics import TokenMetrics, measure, metrics_of, read_together
from grpox_losses.configs import ClippedConfig
from grpox_losses.losses import Dapo

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
CORRECTIONS = ("none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "geometric-mask")
Rows = Sequence[Sequence[float]]
each_correction = pytest.mark.parametrize("correction", CORRECTIONS)


# -- Means and extremes ----------------------------------------------------------------------------------


def test_means_weigh_tokens_and_extremes_are_of_tokens_or_of_the_means_of_micro_batches() -> None:
    metrics = TokenMetrics()
    metrics.add("xy", torch.tensor([[1.0, 2.0], [5.0, 3.0]]))
    metrics.add("xy", torch.tensor([[6.0], [4.0]]))
    metrics.add("m", torch.tensor([[0.0, 1.0]]), of_means=True)
    metrics.add("m", torch.tensor([[1.0, 1.0]]), of_means=True)
    metrics.add("n", torch.ones(1, 0))  # no metric rather than NaN
    metrics.add("o", torch.ones(1, 0), of_means=True)
    named = metrics.named(metrics.reduce(ALONE))
    assert named == {"x": (3, 1, 6), "y": (4, 3, 5), "m": (0.75, 0.5, 1)}
    assert TokenMetrics().named(TokenMetrics().reduce(ALONE)) == {}


def test_tensors_that_are_read_together_keep_their_shapes_and_values() -> None:
    values = torch.tensor([[0.1, math.nan, -2.5]])
    one, nothing, other = read_together([values, None, torch.tensor(7)])
    torch.testing.assert_close(one.float(), values, rtol=0, atol=0, equal_nan=True)
    assert (nothing.numel(), other.shape, other.item()) == (0, (), 7)


def test_phase_times_start_over_when_taken() -> None:
    times = PhaseTimes()
    with times.phase("update"):
        pass
    assert list(times.take()) == ["time/update"]
    assert times.take() == {}


# -- The sampling mismatch -------------------------------------------------------------------------------


def pass_of(samples: Sequence[Sample], step_loss: StepLoss, logprob: float = 0.0) -> Any:
    """A micro-batch whose old policy is certain of every token, and whose log pi is `logprob`."""
    batch = collate(samples, CPU)
    zeros, sampler = torch.zeros_like(batch.sampler_logprobs), batch.sampler_logprobs
    logprobs = (zeros + logprob).requires_grad_()
    inputs = build_inputs(logprobs, batch.token_mask, batch.advantages, zeros, sampler, entropy=zeros)
    return batch, step_loss.micro_batch(inputs, StepTotals(2, 1, 2, 2), sampler)


def measured_logprobs(correction: Any, *micro_batches: Rows) -> dict[str, float]:
    """The mismatch of completions for which the generator reported these."""
    correction = grpox.build("correction", correction) if isinstance(correction, str) else correction
    step_loss, passes = StepLoss(Dapo(ClippedConfig()), correction), []
    for rows in micro_batches:
        rollouts = [
            Rollout(0, place, (1,), tuple(range(len(row))), "stop", 0, tuple(row))
            for place, row in enumerate(rows)
        ]
        passes.append(pass_of(samples_of(rollouts, [0.0] * len(rollouts)), step_loss))
    metrics = measure(passes, correction).metrics
    named = metrics_of(metrics.named(metrics.reduce(ALONE)))
    found = {name.removeprefix("mismatch/"): named[name] for name in named if name.startswith("mismatch/")}
    earlier_names = {f"sampling/{name}": value for name, value in found.items()}
    assert {name: named[name] for name in named if "sampling/" in name} == earlier_names
    return found


def measured(correction: Any, *micro_batches: Rows) -> dict[str, float]:
    """The mismatch of completions with these ratios pi_old / mu; NaN where mu is missing."""
    return measured_logprobs(
        correction, *([[-math.log(ratio) for ratio in row] for row in rows] for rows in micro_batches)
    )


def test_without_a_correction_the_mismatch_is_measured_all_the_same() -> None:
    assert measured("none", [[0.5, 2.0]]) == pytest.approx(
        {
            "ratio_mean": 1.25,
            "ratio_min": 0.5,
            "ratio_max": 2.0,
            # (0.5 + 2)^2 / (2 * (0.25 + 4))
            "effective_sample_size": 6.25 / 8.5,
            "difference_mean": math.log(2),
            "difference_max": math.log(2),
            # mean of (1/2 - 1 + ln 2) and (2 - 1 - ln 2)
            "kl": 0.25,
            "truncated": 0.0,
            "masked": 0.0,
            "missing_logprobs": 0.0,
        },
        rel=1e-6,
    )
    assert measured("none", [[]]) == {}


OF_SEQUENCES = {"ratio_max": 2.0, "raw_ratio_mean": 8.5 / 3, "raw_ratio_min": 0.5, "raw_ratio_max": 4.0}


@pytest.mark.parametrize(
    ("correction", "rows", "expected"),
    [
        # The cap shows in no ratio: (0.5 + 4 + 1)^2 / (3 * (0.25 + 16 + 1)).
        (
            "token-truncate",
            [[0.5, 4.0], [1.0]],
            {
                "ratio_max": 4.0,
                "ratio_mean": 5.5 / 3,
                "effective_sample_size": 30.25 / 51.75,
                "truncated": 1 / 3,
            },
        ),
        # Dropped tokens stay in the ratio.
        ("token-mask", [[0.25, 1.0, 8.0, 1.0]], {"ratio_min": 0.25, "ratio_max": 8.0, "masked": 0.5}),
        # R is 2 * 2 = 4 at two tokens and 0.5 at one: (4 + 4 + 0.5)^2 / (3 * (16 + 16 + 0.25)).
        (
            "sequence-truncate",
            [[2.0, 2.0], [0.5]],
            OF_SEQUENCES | {"effective_sample_size": 72.25 / 96.75, "truncated": 2 / 3},
        ),
        (
            "sequence-mask",
            [[2.0, 2.0], [0.5]],
            OF_SEQUENCES | {"effective_sample_size": 72.25 / 96.75, "masked": 2 / 3},
        ),
        # Means 1 (kept) and sqrt(8). Tokens weigh by their own ratio, so that nothing is truncated at 0.5 < 1:
        # (2 + 0.5 + 4 + 2)^2 / (4 * (4 + 0.25 + 16 + 4)).
        (
            "geometric-mask",
            [[2.0, 0.5], [4.0, 2.0]],
            {
                "raw_ratio_min": 1.0,
                "raw_ratio_max": math.sqrt(8),
                "effective_sample_size": 72.25 / 97,
                "masked": 0.5,
            },
        ),
        # A missing log-probability counts as equal.
        (
            "token-truncate",
            [[4.0, math.nan]],
            {"missing_logprobs": 0.5, "ratio_mean": 2.5, "difference_mean": math.log(4) / 2, "truncated": 0.5},
        ),
    ],
)
def test_by_hand_at_the_level_of_the_correction(
    correction: str, rows: Rows, expected: dict[str, float]
) -> None:
    found = measured(correction, rows)
    expected = {"truncated": 0.0, "masked": 0.0} | expected
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert ("raw_ratio_mean" in found) == ("token" not in correction)


@each_correction
def test_micro_batches_make_no_difference_and_rounding_is_not_truncation(correction: str) -> None:
    rows = [[0.5, 3.0, 1.0], [1.2], [0.9, 6.0]]
    assert measured(correction, *([row] for row in rows)) == pytest.approx(measured(correction, rows))
    if correction != "geometric-mask":
        # Weights are float32, ratios float64: in half of the tokens one of the two is a little less.
        ratios = (0.01 * torch.randn(8, 50, generator=torch.Generator().manual_seed(0))).exp().tolist()
        found = measured(correction, ratios)
        assert (found["truncated"], found["masked"]) == (0.0, 0.0)


@each_correction
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e6, -1e6, math.inf, -math.inf])
def test_no_metric_is_infinite_or_nan(correction: str, difference: float) -> None:
    found = measured_logprobs(correction, [[-difference, 0.0]])
    assert [key for key, value in found.items() if not math.isfinite(value)] == []
    assert 0 < found["effective_sample_size"] <= 1 + 1e-9
    assert found["difference_max"] == min(abs(difference), 300)


class Halved:
    """A third-party correction of tokens that tells no raw."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return (old - sampler).exp() / 2, torch.ones_like(mask)


class Unsure(Halved):
    """One whose raw is not a number."""

    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        return torch.full_like(old, math.nan)


class ChangesOld(Halved):
    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        return old.sub_(sampler).exp()


class Divides(Halved):
    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_corrections_of_others() -> None:
    assert measured(Halved(), [[0.5, 2.0]])["truncated"] == 1.0
    assert measured(Unsure(), [[0.5, 2.0]])["raw_ratio_mean"] == 1.0
    with pytest.raises(RunFailed, match="correction 'ChangesOld' must not change old in place"):
        measured(ChangesOld(), [[0.5, 2.0]])
    with pytest.raises(RunFailed, match="correction 'Divides' raised ZeroDivisionError"):
        measured(Divides(), [[0.5, 2.0]])


class Forgetful(Dapo):
    """Has a diagnostic of sequences, except where no token counts."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        own = {"of_sequence": inputs.advantages.sum(dim=1)} if bool(inputs.token_mask.any()) else {}
        return LossOutput(super().per_token(inputs).loss, own)


def test_a_filler_whose_loss_leaves_out_a_diagnostic_adds_the_same_names() -> None:
    """The reduction of ranks is one collective, and one rank alone may have a filler."""
    none = grpox.build("correction", "none")
    step_loss = StepLoss(Forgetful(ClippedConfig()), none, off_policy_mask_threshold=0.1)
    (sample,) = samples_of([Rollout(0, 0, (1,), (3, 4), "stop", 0, (-1.0, -9.0))], [-1.0])
    filler = replace(sample, token_mask=np.zeros(2, np.bool_))
    # log mu - log pi is 15 on average
    passes = [pass_of([each], step_loss, logprob=-20.0) for each in (sample, filler)]
    with_filler, without = (measure(each, none).metrics for each in (passes, passes[:1]))
    assert with_filler.reduce(ALONE).shape == without.reduce(ALONE).shape
    assert without.named(without.reduce(ALONE))["off_policy_masked"] == (1.0, 1.0, 1.0)


def test_ratios_of_sequences_count_sequences() -> None:
    """Count one clipped sequence of 2 tokens among others of 5 and 9: a third, as in TRL, and not 2 of 16."""
    unknown = [np.full(length, np.nan, np.float32) for length in (2, 5, 9)]
    samples = [Sample((1,), (2,) * len(row), np.isnan(row), row, 1.0) for row in unknown]
    samples.append(replace(samples[0], token_mask=np.zeros(2, bool)))  # not trained on
    batch, none = collate(samples, CPU), grpox.build("correction", "none")
    now, old = torch.full(batch.token_mask.shape, 0.1), torch.zeros(batch.token_mask.shape)
    now[0] = 0.5
    inputs = build_inputs(now, batch.token_mask, batch.advantages, old, None, entropy=old)
    step_loss = StepLoss(grpox.build("loss", "grpo", {"level": "sequence"}), none)
    result = step_loss.micro_batch(inputs, StepTotals(16, 4, 1, 9))
    metrics = measure([(batch, result.detached())], none).metrics
    named = metrics.named(metrics.reduce(ALONE))
    for name, value in (("high", 1 / 3), ("low", 0), ("region", 1 / 3)):
        assert named[f"clip_ratio/{name}"] == pytest.approx((value,) * 3)
    assert named["ratio"][0] == pytest.approx((2 * math.exp(0.5) + 14 * math.exp(0.1)) / 16)  # of tokens


# -- Alarms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "ratios", "alarms"),
    [
        ("none", [[0.51, 0.51]], []),
        ("none", [[1.99, 1.99]], []),
        ("none", [[0.49, 0.49]], ["ratio_mean"]),
        ("none", [[2.02, 2.02]], ["ratio_mean"]),
        # Nine of 0.05 and one of 9.5: the mean is healthy, (0.45 + 9.5)^2 / (10 * 90.27) = 0.11.
        ("none", [[0.05] * 9 + [9.5]], ["effective_sample_size"]),
        # The ratios of single tokens are healthy; those of completions 1.9^8 = 170 and 1.
        ("sequence-mask", [[1.9] * 8, *([[1.0]] * 30)], ["effective_sample_size"]),
        ("token-mask", [[1.9] * 8, *([[1.0]] * 30)], []),
        ("token-truncate", [[1.0, math.nan]], ["missing_logprobs"]),
    ],
)
def test_what_is_unhealthy_is_told(correction: str, ratios: Rows, alarms: list[str]) -> None:
    metrics = {f"mismatch/{name}": value for name, value in measured(correction, ratios).items()}
    told = mismatch_warnings(metrics, 7, promised=True)
    assert list(told) == [f"mismatch/{name}" for name in alarms]
    for name, text in told.items():
        assert text.startswith(f"{name} is {metrics[name]:.3g} at step 7; healthy is ")
    # A generator that promises no log-probabilities may leave them out.
    of_others = [name for name in told if name != "mismatch/missing_logprobs"]
    assert list(mismatch_warnings(metrics, 7, promised=False)) == of_others


def test_each_alarm_is_told_once_and_only_by_the_main_process(logged: LoggedText) -> None:
    unhealthy = {"mismatch/ratio_mean": 2.5, "mismatch/missing_logprobs": 0.1}
    for main, times in ((False, 0), (True, 1)):
        collector: Any = SimpleNamespace(sampler=SimpleNamespace(times=PhaseTimes()))
        observers: Any = SimpleNamespace(failures={}, step_finished=lambda *told: None)
        context: Any = None
        warn = WarnOnce(get_logger("grpox.test"))
        report = StepReport(context, TrainingState(), collector, observers, warn, main, logprobs_promised=True)
        for step in (3, 4):
            with collector.sampler.times.phase("update"):
                pass
            report.step_finished(step, 0.0, [], [], unhealthy, 1.0)
        told = logged()
        for name, value, healthy in (("ratio_mean", "2.5", "0.5 to 2"), ("missing_logprobs", "0.1", "0")):
            lines = [line for line in told.splitlines() if f"mismatch/{name} is {value} at step 3" in line]
            assert [f"healthy is {healthy}." in line for line in lines] == [True] * times
        assert told.count("warning") == 2 * times


# -- The first step --------------------------------------------------------------------------------------


def first(
    update: dict[str, float], kind: str = "llama", dtype: torch.dtype = torch.float32, **sections: Any
) -> dict[str, float]:
    run = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"name": "exact-match"}]}
    config = RunConfig.model_validate(run | {"loss": "grpo", "output_dir": "runs/a"} | sections)
    return first_step_measures(update, config, model_of(kind, dtype), "generator" in sections)


@pytest.mark.parametrize("name", ["mismatch/difference_mean", "kl"])
def test_hf_in_float32_samples_from_what_is_trained(name: str) -> None:
    assert first({name: 9e-5}) == {FIRST: 9e-5, ALLOWED: 1e-4}
    with pytest.raises(RunFailed, match="equal weights"):
        first({name: 2e-4})
    # Another distribution than the trained one is not compared.
    assert first({"mismatch/difference_mean": 0.2}, sampling={"top_p": 0.9})[FIRST] == 0


@pytest.mark.parametrize(
    ("kind", "dtype", "sections", "allowed"),
    [
        ("llama", torch.bfloat16, {}, 0.0625),
        ("mixtral", torch.float32, {}, 1e-4),
        ("llama", torch.float32, {"generator": "vllm-server"}, 1e-4),
    ],
)
def test_elsewhere_an_alarm_sees_the_difference(
    kind: str, dtype: torch.dtype, sections: dict[str, Any], allowed: float
) -> None:
    update = {"kl": 0.1, "mismatch/difference_mean": 0.2}
    assert first(update, kind, dtype, **sections) == {FIRST: 0.2, ALLOWED: allowed}
