"""Samples of a step: the log-probabilities that are kept with each, and how often each counts."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.small_models import far, gradient_of
from test_packing import ALL_OFF, WORLD, micro_batches_of
from test_policy_terms import TEMPERATURE, PlainEngine, expected, later, small_model, step_of, update
from torch import Tensor

from grpox.config import TrainConfig
from grpox.errors import RunFailed
from grpox.policy.batch import Sample, collate, upload
from grpox.policy.logprobs import completion_logprobs
from grpox.update import policy_update
from grpox.update.nonfinite import SkippedSteps
from grpox.update.policy_update import keep_logprobs

SETTINGS: list[dict[str, Any]] = [{}, ALL_OFF, {"max_tokens_per_micro_batch": 40}]
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=["default", "all off", "budget"])


def of_step(micro_batches: Iterable[list[Sample]]) -> list[Sample]:
    return list(itertools.chain.from_iterable(micro_batches))


def two_generations() -> list[list[Sample]]:
    """Three micro-batches of a generation that was trained on before, and two of a new one."""
    trained_on, new = later(micro_batches_of(11)), micro_batches_of(12, count=2)
    for sample in of_step(new):
        sample.reference_logprobs = torch.full((len(sample.completion),), -4.7, dtype=torch.float64)
    return [trained_on[0], new[0], trained_on[1], new[1], trained_on[2]]


def known(micro_batches: Iterable[list[Sample]]) -> list[Tensor | None]:
    return [sample.old_logprobs for sample in of_step(micro_batches)]


def logprobs_of(model: Any, samples: list[Sample]) -> list[Tensor]:
    batch = collate(samples, WORLD.device)
    with torch.no_grad():
        return batch.cut(completion_logprobs(model, batch, TEMPERATURE)[0])


def assert_kept(
    micro_batches: list[list[Sample]], before: list[Any], model: Any, name: str = "old_logprobs"
) -> None:
    """Samples that had none have the model's log-probabilities, without a graph; the others have their own."""
    wanted = [row for samples in micro_batches for row in logprobs_of(model, samples)]
    for old, sample, own in zip(before, of_step(micro_batches), wanted, strict=True):
        found = getattr(sample, name)
        if old is not None:
            assert found is old
            continue
        mask = torch.from_numpy(sample.token_mask)  # for other tokens a model need not compute any
        torch.testing.assert_close(found[mask], own[mask], rtol=0, atol=1e-5)
        assert (found.grad_fn, found.grad) == (None, None)


@each_setting
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["grpo", "bnpo"])
def test_two_generations_in_a_step_each_have_their_own_old_policy(
    loss: str, beta: float, settings: dict[str, Any]
) -> None:
    micro_batches = two_generations()
    wanted, value = expected(micro_batches, loss, beta=beta)
    found, metrics = step_of(micro_batches, loss, beta=beta, **settings)
    assert far(found, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(value, rel=1e-6)
    assert metrics["ratio/max"] > 1  # that of the generation which was trained on before


@each_setting
def test_a_step_keeps_the_old_policy_of_the_samples_that_have_none(settings: dict[str, Any]) -> None:
    micro_batches, model = two_generations(), small_model()
    before = known(micro_batches)
    update(model, "grpo", entropy_coef=0.1, **settings).step(micro_batches)
    assert_kept(micro_batches, before, model)  # no step changes it
    assert gradient_of(model).isfinite().all()


def test_samples_of_later_steps_are_scored_before_the_policy_moves() -> None:
    micro_batches, model = two_generations(), small_model()
    before = known(micro_batches)
    scoring = update(model, "grpo")
    scoring.score_old(micro_batches)
    engine: Any = scoring.engine
    forwards = engine.forwards
    assert_kept(micro_batches, before, model)
    assert forwards <= 2  # of the two micro-batches that are new
    scoring.score_old(micro_batches)
    assert engine.forwards == forwards


def test_slices_of_a_generation_batch_have_one_reference_that_follows() -> None:
    micro_batches = micro_batches_of(12, count=2)
    scoring = update(small_model(), "grpo", beta=0.1, sync_ref_model=True)
    reference: Any = PlainEngine(small_model(), TrainConfig())
    scoring.reference = reference
    scoring.score_old(micro_batches[1:])
    scoring.step(micro_batches[:1])
    for parameter in reference.model.parameters():  # as `sync_reference` does after the step
        parameter.data.mul_(1.1)
    scoring.step(micro_batches[1:])
    assert_kept(micro_batches, [None] * 16, small_model(), "reference_logprobs")


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_step_that_is_not_taken_keeps_no_old_policy(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    micro_batches = micro_batches_of(13)
    taken = update(small_model(), "grpo", on_nonfinite="skip")
    engine: Any = taken.engine
    if fault == "loss":
        of_step(micro_batches)[-1].advantage = float("nan")
    else:
        monkeypatch.setattr(engine, "step", lambda loss: torch.tensor(float("inf"), dtype=torch.float64))
    taken.step(micro_batches)
    assert taken.nonfinite.skipped == SkippedSteps(1, 1)
    assert all(sample.old_logprobs is None for sample in of_step(micro_batches))


@each_setting
@pytest.mark.parametrize("moved", [False, True])
def test_a_sample_that_is_twice_in_a_step_counts_twice(settings: dict[str, Any], moved: bool) -> None:
    """As it is, and as two samples that hold the same."""
    micro_batches = micro_batches_of(14)
    if moved:
        later(micro_batches)
    twice = next(sample for sample in micro_batches[0] if sample.advantage and sample.token_mask.any())
    micro_batches[2][3] = copy.deepcopy(twice)
    wanted, value = expected(micro_batches, "grpo")
    apart, _ = step_of(micro_batches, "grpo", **settings)
    micro_batches[2][3] = twice
    found, metrics = step_of(micro_batches, "grpo", **settings)
    assert far(found, wanted) < 1e-6
    assert far(apart, wanted) < 1e-6
    assert metrics["loss"] == pytest.approx(value, rel=1e-6, abs=1e-9)


def test_a_sample_that_is_twice_in_a_step_is_told_of_at_each_place() -> None:
    """The first place, with the tokens of all three."""
    micro_batches = micro_batches_of(14)
    faulty = micro_batches[1][0] = micro_batches[1][5] = micro_batches[0][2]
    faulty.advantage = float("nan")
    taken = update(small_model(), "grpo")
    others = 3 * int(faulty.token_mask.sum()) - 1
    where = rf"advantage nan at rank 0, micro-batch 0, row 2, token 0 \(and at {others} other tokens\)"
    with pytest.raises(RunFailed, match=where):
        taken.step(micro_batches)


@each_setting
def test_a_reference_is_kept_with_the_samples_that_have_none(settings: dict[str, Any]) -> None:
    micro_batches = micro_batches_of(15)
    every = of_step(micro_batches)
    for sample in every[::2]:
        sample.reference_logprobs = torch.full((len(sample.completion),), -4.7, dtype=torch.float64)
    before = [sample.reference_logprobs for sample in every]
    model = small_model()
    taken = update(model, "grpo", beta=0.1, **settings)
    reference: Any = PlainEngine(small_model(), TrainConfig(beta=0.1, **settings))
    taken.reference = reference
    taken.step(micro_batches)
    assert_kept(micro_batches, before, model, "reference_logprobs")
    forwards = reference.forwards
    assert forwards > 0
    taken.step(micro_batches)
    assert reference.forwards == forwards  # all have one: no forward, on any rank


def test_what_is_kept_is_of_the_tokens_alone_without_padding() -> None:
    [samples, *_] = micro_batches_of(16)
    batch = collate(samples, WORLD.device)
    keep_logprobs(batch, torch.arange(batch.token_mask.numel()).view_as(batch.token_mask).float())
    tokens = sum(len(sample.completion) for sample in samples)
    for row, sample in enumerate(samples):
        assert sample.old_logprobs is not None
        first = row * batch.token_mask.shape[1]
        assert sample.old_logprobs.tolist() == list(range(first, first + len(sample.completion)))
        assert sample.old_logprobs.untyped_storage().nbytes() == 4 * tokens


@each_setting
@pytest.mark.parametrize(("beta", "entropy_coef"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.1, 0.02)])
def test_the_policy_term_is_told_where_the_loss_has_other_terms(
    beta: float, entropy_coef: float, settings: dict[str, Any]
) -> None:
    """The loss is linear in its terms: the policy term is the loss of the same step without the others."""
    alone = step_of(two_generations(), "grpo", **settings)[1]
    metrics = step_of(two_generations(), "grpo", beta=beta, entropy_coef=entropy_coef, **settings)[1]
    assert metrics.get("entropy_coef", 0.0) == entropy_coef
    assert ("policy_loss" in metrics) == (beta > 0 or entropy_coef > 0)
    assert metrics.get("policy_loss", metrics["loss"]) == pytest.approx(alone["loss"], rel=1e-6)
    if beta or entropy_coef:
        assert metrics["loss"] != pytest.approx(alone["loss"], rel=1e-4)


@pytest.mark.parametrize("chunked", [True, False])
def test_the_host_prepares_a_pass_before_the_backward_of_the_one_before(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed waits for the device at the end of a backward pass: what comes then finds it idle."""
    settings = {"chunked_logprobs": chunked, "prefix_sharing": False, "skip_zero_advantage": False}
    taken = update(small_model(), "grpo", max_tokens_per_micro_batch=40, **settings)
    events = ""

    def noting(letter: str, function: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            nonlocal events
            events += letter
            return function(*arguments, **named)

        return noted

    engine: Any = taken.engine
    monkeypatch.setattr(engine, "backward", noting("b", engine.backward))
    monkeypatch.setattr(policy_update, "forward_pass", noting("f", policy_update.forward_pass))
    monkeypatch.setattr("grpox.policy.batch.upload", noting("u", upload))
    taken.step(micro_batches_of(15))
    # One upload of each pass: the batch, with its layout or its padded ids.
    assert re.fullmatch("u(fub){2,}fb", events)
    events = ""
    monkeypatch.setattr(policy_update, "completion_logprobs", noting("f", policy_update.completion_logprobs))
    taken.score_old(micro_batches_of(15))
    assert re.fullmatch("(uf){3,}", events)
