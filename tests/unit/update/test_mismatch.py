"""Metrics of the sampling mismatch: before any cap or mask, at the correction's level, and always finite."""

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

from grpox.checkpoint.progress import TrainingState
from grpox.config import RunConfig
from grpox.config.alarms import ALLOWED, FIRST
from grpox.contracts import Correction, LossInputs, LossOutput, Rollout
from grpox.errors import RunFailed
from grpox.policy.batch import collate, samples_of
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.training.step_report import StepReport
from grpox.update.mismatch import first_step_measures, mismatch_warnings
from grpox.update.objective import StepLoss, build_inputs
from grpox.update.packing import StepTotals
from grpox.update.token_metrics import measure, metrics_of
from grpox_corrections.configs import (
    GeometricMaskConfig,
    SequenceMaskConfig,
    SequenceTruncateConfig,
    TokenMaskConfig,
    TokenTruncateConfig,
)
from grpox_corrections.corrections import (
    GeometricMask,
    NoCorrection,
    SequenceMask,
    SequenceTruncate,
    TokenMask,
    TokenTruncate,
)
from grpox_losses.configs import ClippedConfig
from grpox_losses.losses import Dapo

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
NONE = NoCorrection()
ALL: dict[str, Correction] = {
    "none": NONE,
    "token-truncate": TokenTruncate(TokenTruncateConfig()),
    "token-mask": TokenMask(TokenMaskConfig()),
    "sequence-truncate": SequenceTruncate(SequenceTruncateConfig()),
    "sequence-mask": SequenceMask(SequenceMaskConfig()),
    "geometric-mask": GeometricMask(GeometricMaskConfig()),
}
Rows = Sequence[Sequence[float]]


def measured(correction: Correction, *micro_batches: Rows) -> dict[str, float]:
    """The mismatch of completions with these ratios pi_old / mu; NaN where mu is missing."""
    return measured_logprobs(
        correction, *([[-math.log(ratio) for ratio in row] for row in rows] for rows in micro_batches)
    )


def measured_logprobs(correction: Correction, *micro_batches: Rows) -> dict[str, float]:
    """The mismatch where the generator reported these, and the policy is certain of every token."""
    passes = []
    for rows in micro_batches:
        rollouts = [
            Rollout(0, place, (1,), tuple(range(len(row))), "stop", 0, tuple(row))
            for place, row in enumerate(rows)
        ]
        batch = collate(samples_of(rollouts, [0.0] * len(rollouts)), CPU)
        mask, sampler = batch.token_mask, batch.sampler_logprobs
        zeros = torch.zeros_like(sampler)
        inputs = build_inputs(
            zeros.clone().requires_grad_(), mask, batch.advantages, zeros, sampler, entropy=zeros
        )
        step_loss = StepLoss(Dapo(ClippedConfig()), correction)
        passes.append((batch, step_loss.micro_batch(inputs, StepTotals(1, 1, 1, 1), sampler)))
    metrics = measure(passes, correction).metrics
    named = metrics_of(metrics.named(metrics.reduce(ALONE)))
    found = {name.removeprefix("mismatch/"): named[name] for name in named if name.startswith("mismatch/")}
    earlier_names = {f"sampling/{name}": value for name, value in found.items()}
    assert {name: named[name] for name in named if "sampling/" in name} == earlier_names
    return found


def test_without_a_correction_the_mismatch_is_measured_all_the_same() -> None:
    ln2 = math.log(2)
    assert measured(NONE, [[0.5, 2.0]]) == pytest.approx(
        {
            "ratio_mean": 1.25,
            "ratio_min": 0.5,
            "ratio_max": 2.0,
            # (0.5 + 2)^2 / (2 * (0.25 + 4))
            "effective_sample_size": 6.25 / 8.5,
            "difference_mean": ln2,
            "difference_max": ln2,
            # mean of (1/2 - 1 + ln 2) and (2 - 1 - ln 2)
            "kl": 0.25,
            "truncated": 0.0,
            "masked": 0.0,
            "missing_logprobs": 0.0,
        },
        rel=1e-6,
    )


def test_the_cap_shows_in_no_ratio_but_in_the_share_of_truncated_tokens() -> None:
    found = measured(ALL["token-truncate"], [[0.5, 4.0], [1.0]])

    assert found["ratio_max"] == pytest.approx(4.0)
    assert found["ratio_mean"] == pytest.approx(5.5 / 3)
    # (0.5 + 4 + 1)^2 / (3 * (0.25 + 16 + 1))
    assert found["effective_sample_size"] == pytest.approx(30.25 / 51.75)
    assert (found["truncated"], found["masked"]) == (pytest.approx(1 / 3), 0.0)
    assert "raw_ratio_mean" not in found


def test_masked_tokens_are_counted_and_stay_in_the_ratio() -> None:
    found = measured(ALL["token-mask"], [[0.25, 1.0, 8.0, 1.0]])

    assert (found["ratio_min"], found["ratio_max"]) == (pytest.approx(0.25), pytest.approx(8.0))
    assert (found["truncated"], found["masked"]) == (0.0, 0.5)


def test_sequence_forms_are_measured_at_their_own_level() -> None:
    # R is 2 * 2 = 4 at two tokens and 0.5 at one: (4 + 4 + 0.5)^2 / (3 * (16 + 16 + 0.25)).
    ratios = [[2.0, 2.0], [0.5]]
    for name, share in {"sequence-truncate": "truncated", "sequence-mask": "masked"}.items():
        found = measured(ALL[name], ratios)
        assert found["ratio_max"] == pytest.approx(2.0)
        assert found["raw_ratio_mean"] == pytest.approx(8.5 / 3)
        assert (found["raw_ratio_min"], found["raw_ratio_max"]) == (pytest.approx(0.5), pytest.approx(4.0))
        assert found["effective_sample_size"] == pytest.approx(72.25 / 96.75)
        assert found[share] == pytest.approx(2 / 3)
        assert found["truncated"] + found["masked"] == found[share]


def test_the_geometric_mean_bounds_but_its_tokens_weigh_by_their_own_ratio() -> None:
    # Means 1 (kept) and sqrt(8); 0.5 and 2 are weights, so that nothing is truncated at 0.5 < 1.
    found = measured(ALL["geometric-mask"], [[2.0, 0.5], [4.0, 2.0]])

    assert (found["raw_ratio_min"], found["raw_ratio_max"]) == (
        pytest.approx(1.0),
        pytest.approx(math.sqrt(8)),
    )
    assert (found["truncated"], found["masked"]) == (0.0, 0.5)
    # (2 + 0.5 + 4 + 2)^2 / (4 * (4 + 0.25 + 16 + 4))
    assert found["effective_sample_size"] == pytest.approx(72.25 / 97)


@pytest.mark.parametrize("name", ALL)
def test_micro_batches_make_no_difference(name: str) -> None:
    rows = [[0.5, 3.0, 1.0], [1.2], [0.9, 6.0]]
    assert measured(ALL[name], *([row] for row in rows)) == pytest.approx(measured(ALL[name], rows))


def test_missing_log_probabilities_count_as_equal_and_are_told() -> None:
    found = measured(ALL["token-truncate"], [[4.0, math.nan]])

    assert found["missing_logprobs"] == 0.5
    assert found["ratio_mean"] == pytest.approx(2.5)
    assert found["difference_mean"] == pytest.approx(math.log(4) / 2)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e6, -1e6, math.inf, -math.inf])
def test_no_metric_is_infinite_or_nan(name: str, difference: float) -> None:
    found = measured_logprobs(ALL[name], [[-difference, 0.0]])

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


def test_a_raw_that_raises_or_changes_its_arguments_ends_the_run_by_name() -> None:
    with pytest.raises(RunFailed, match="correction 'ChangesOld' must not change old in place"):
        measured(ChangesOld(), [[0.5, 2.0]])
    with pytest.raises(RunFailed, match="correction 'Divides' raised ZeroDivisionError"):
        measured(Divides(), [[0.5, 2.0]])


def test_corrections_of_others() -> None:
    assert measured(Halved(), [[0.5, 2.0]])["truncated"] == 1.0
    assert measured(Unsure(), [[0.5, 2.0]])["raw_ratio_mean"] == 1.0


@pytest.mark.parametrize("name", [name for name in ALL if name != "geometric-mask"])
def test_rounding_is_not_truncation(name: str) -> None:
    # Weights are float32, ratios float64: in half of the tokens one of the two is a little less.
    generator = torch.Generator().manual_seed(0)
    ratios = (0.01 * torch.randn(8, 50, generator=generator)).exp().tolist()
    found = measured(ALL[name], ratios)
    assert (found["truncated"], found["masked"]) == (0.0, 0.0)


def test_a_step_without_tokens_has_no_metrics() -> None:
    assert measured(NONE, [[]]) == {}


class Forgetful(Dapo):
    """Has a diagnostic of sequences, except where no token counts."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        own = {"of_sequence": inputs.advantages.sum(dim=1)} if bool(inputs.token_mask.any()) else {}
        return LossOutput(super().per_token(inputs).loss, own)


def test_a_filler_whose_loss_leaves_out_a_diagnostic_adds_the_same_names() -> None:
    """The reduction of ranks is one collective, and one rank alone may have a filler."""
    step_loss = StepLoss(Forgetful(ClippedConfig()), NONE, off_policy_mask_threshold=0.1)
    (sample,) = samples_of([Rollout(0, 0, (1,), (3, 4), "stop", 0, (-1.0, -9.0))], [-1.0])
    filler = replace(sample, token_mask=np.zeros(2, np.bool_))
    passes = []
    for each in (sample, filler):
        batch = collate([each], CPU)
        zeros = torch.zeros_like(batch.sampler_logprobs)
        logprobs = (zeros - 20).requires_grad_()  # log mu - log pi is 15 on average
        inputs = build_inputs(
            logprobs, batch.token_mask, batch.advantages, zeros, batch.sampler_logprobs, entropy=zeros
        )
        result = step_loss.micro_batch(inputs, StepTotals(2, 1, 2, 2), batch.sampler_logprobs)
        passes.append((batch, result))
    with_filler, without = (measure(each, NONE).metrics for each in (passes, passes[:1]))
    assert with_filler.reduce(ALONE).shape == without.reduce(ALONE).shape
    assert without.named(without.reduce(ALONE))["off_policy_masked"] == (1.0, 1.0, 1.0)


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
    metrics = {f"mismatch/{name}": value for name, value in measured(ALL[correction], ratios).items()}
    told = mismatch_warnings(metrics, 7, promised=True)
    assert list(told) == [f"mismatch/{name}" for name in alarms]
    for name, text in told.items():
        assert text.startswith(f"{name} is {metrics[name]:.3g} at step 7; healthy is ")


def test_a_generator_that_promises_no_log_probabilities_may_leave_them_out() -> None:
    metrics = {"mismatch/missing_logprobs": 1.0, "mismatch/ratio_mean": 1.0}
    assert mismatch_warnings(metrics, 1, promised=False) == {}
    assert list(mismatch_warnings(metrics, 1, promised=True)) == ["mismatch/missing_logprobs"]


def test_each_alarm_is_told_once_and_only_by_the_main_process(logged: LoggedText) -> None:
    unhealthy = {"mismatch/ratio_mean": 2.5, "mismatch/missing_logprobs": 0.1}
    for main, times in ((False, 0), (True, 1)):
        report = step_report(main)
        for step in (3, 4):
            with report.collector.sampler.times.phase("update"):
                pass
            report.step_finished(step, 0.0, [], [], unhealthy, 1.0)
        told = logged()
        for name, value, healthy in (("ratio_mean", "2.5", "0.5 to 2"), ("missing_logprobs", "0.1", "0")):
            lines = [line for line in told.splitlines() if f"mismatch/{name} is {value} at step 3" in line]
            assert [f"healthy is {healthy}." in line for line in lines] == [True] * times
        assert told.count("warning") == 2 * times


def step_report(main: bool) -> StepReport:
    collector: Any = SimpleNamespace(sampler=SimpleNamespace(times=PhaseTimes()))
    observers: Any = SimpleNamespace(failures={}, step_finished=lambda *told: None)
    context: Any = None
    return StepReport(
        context,
        TrainingState(),
        collector,
        observers,
        WarnOnce(get_logger("grpox.test")),
        main,
        logprobs_promised=True,
    )


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
    assert first({"kl": 0.1, "mismatch/difference_mean": 0.2}, kind, dtype, **sections) == {
        FIRST: 0.2,
        ALLOWED: allowed,
    }


def test_another_distribution_than_the_trained_one_is_not_compared() -> None:
    assert first({"mismatch/difference_mean": 0.2}, sampling={"top_p": 0.9})[FIRST] == 0
