"""The inputs that a loss asks for: exactly those, neutral where masked, refused where they are missing."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from grpox.contracts import LossInputs, LossOutput, Reduction, Rollout
from grpox.errors import RunFailed
from grpox.policy.batch import Sample, collate, samples_of
from grpox.update.objective import StepLoss, build_inputs
from grpox.update.packing import StepTotals
from grpox_corrections.corrections import NoCorrection

CPU = torch.device("cpu")
NONE = NoCorrection()
MASK = torch.tensor([[1, 1], [1, 0]]).bool()
TOTALS = StepTotals(tokens=3, sequences=2, micro_batches=1, max_completion_length=2)
NAN = math.nan
OPEN = {"reference_logprobs", "sampler_logprobs", "rewards", "group_ids", "sequence_ids", "columns"}


class Noting:
    """-log pi; keeps the inputs of its last call."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.inputs = inputs
        return LossOutput(-inputs.logprobs)


def tensors(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "logprobs": torch.tensor([[-1.0, -2.0], [-0.5, NAN]], requires_grad=True),
        "token_mask": MASK,
        "advantages": torch.tensor([1.0, -1.0]),
        "old_logprobs": torch.tensor([[-1.5, -2.5], [-0.25, NAN]]),
        "sampler_logprobs": torch.tensor([[-1.25, NAN], [-0.75, 7.0]]),
        "reference_logprobs": torch.tensor([[-3.0, -1.0], [-2.0, NAN]]),
        "entropy": torch.tensor([[0.5, 0.25], [1.0, NAN]], requires_grad=True),
        "rewards": torch.tensor([[1.0], [NAN]]),
        "group_ids": torch.tensor([4, 4]),
        "sequence_ids": torch.tensor([16, 17]),
        "columns": {"answer": ["yes", "no"]},
    }
    return {**given, **changes}


def inputs_of(**changes: Any) -> LossInputs:
    return build_inputs(**tensors(**changes))


def noted(*needs: str, **changes: Any) -> LossInputs:
    loss = Noting()
    StepLoss(loss, NONE, needs=frozenset(needs)).micro_batch(inputs_of(**changes), TOTALS)
    return loss.inputs


def test_a_loss_that_asks_for_nothing_is_given_nothing_more() -> None:
    given = noted()
    assert {name for name in OPEN if getattr(given, name) is not None} == set()
    assert given.entropy is not None
    assert not given.entropy.requires_grad


@pytest.mark.parametrize("name", sorted(OPEN))
def test_a_loss_is_given_what_it_asks_for_and_nothing_else(name: str) -> None:
    given = noted(name)
    assert {each for each in OPEN if getattr(given, each) is not None} == {name}


def test_unknown_log_probabilities_of_the_generator_are_pi_old_and_masked_ones_are_zero() -> None:
    sampler = noted("sampler_logprobs").sampler_logprobs
    assert sampler is not None
    assert sampler.tolist() == [[-1.25, -2.5], [-0.75, 0.0]]
    unknown = noted("sampler_logprobs", sampler_logprobs=None).sampler_logprobs
    assert unknown is not None
    assert unknown.tolist() == [[-1.5, -2.5], [-0.25, 0.0]]


def test_the_reference_is_zero_where_masked_and_measured_without_a_penalty() -> None:
    loss = Noting()
    made = StepLoss(loss, NONE, needs=frozenset(["reference_logprobs"])).micro_batch(inputs_of(), TOTALS)
    assert loss.inputs.reference_logprobs is not None
    assert loss.inputs.reference_logprobs.tolist() == [[-3.0, -1.0], [-2.0, 0.0]]
    # rho = -2, 1, -1.5: k3 = exp(rho) - rho - 1
    expected = [[math.exp(-2) + 1, math.e - 2], [math.exp(-1.5) + 0.5, 0.0]]
    torch.testing.assert_close(made.diagnostics["kl"], torch.tensor(expected))
    assert made.loss.item() == pytest.approx((1 + 2 + 0.5) / 3)  # the loss is -log pi alone
    assert "kl" not in StepLoss(loss, NONE).micro_batch(inputs_of(), TOTALS).diagnostics


def test_an_infinite_divergence_adds_nothing_without_a_penalty() -> None:
    far = torch.tensor([[-1.0, 200.0], [-1.0, 0.0]])
    step_loss = StepLoss(Noting(), NONE, needs=frozenset(["reference_logprobs"]))
    made = step_loss.micro_batch(inputs_of(reference_logprobs=far), TOTALS)
    assert bool(made.diagnostics["kl"].isinf().any())
    assert made.loss.item() == pytest.approx(3.5 / 3)


def test_the_entropy_has_a_gradient_only_for_a_loss_that_asks_for_it() -> None:
    class Regularised(Noting):
        def per_token(self, inputs: LossInputs) -> LossOutput:
            assert inputs.entropy is not None
            return LossOutput(-inputs.logprobs - 0.5 * inputs.entropy)

    for needs, expected in ((("entropy_gradient",), [[-0.5 / 3] * 2, [-0.5 / 3, 0.0]]), (("entropy",), None)):
        given = tensors()
        step_loss = StepLoss(Regularised(), NONE, needs=frozenset(needs))
        assert step_loss.entropy_gradient == (expected is not None)
        step_loss.micro_batch(build_inputs(**given), TOTALS).loss.backward()  # type: ignore[no-untyped-call]
        gradient = given["entropy"].grad
        assert (None if gradient is None else gradient.tolist()) == (
            None if expected is None else [pytest.approx(row) for row in expected]
        )


@pytest.mark.parametrize("name", ["reference_logprobs", "rewards", "group_ids", "sequence_ids", "columns"])
def test_samples_that_lack_what_the_loss_needs_are_refused_by_name(name: str) -> None:
    with pytest.raises(RunFailed, match=f"'Noting' needs {name}"):
        noted(name, **{name: None})


def test_an_input_that_a_loss_changes_ends_the_run() -> None:
    class Greedy(Noting):
        def per_token(self, inputs: LossInputs) -> LossOutput:
            assert inputs.rewards is not None
            inputs.rewards.add_(1)
            return LossOutput(-inputs.logprobs)

    with pytest.raises(RunFailed, match="rewards in place"):
        StepLoss(Greedy(), NONE, needs=frozenset(["rewards"])).micro_batch(inputs_of(), TOTALS)


def carrying() -> list[Sample]:
    samples = samples_of(
        [Rollout(0, 0, (1,), (2, 3), "stop", 0), Rollout(0, 1, (1,), (4,), "stop", 0)], [1, -1]
    )
    for row, sample in enumerate(samples):
        sample.rewards = np.array([row, NAN], np.float32)
        sample.group_id, sample.sequence_id = 7, 2**40 + row
        sample.columns = {"answer": str(row), "tags": ["a"]}
    return samples


def test_a_batch_holds_what_its_samples_carry() -> None:
    batch = collate(carrying(), CPU)
    assert batch.rewards is not None
    assert batch.rewards.dtype == torch.float32
    torch.testing.assert_close(batch.rewards, torch.tensor([[0.0, NAN], [1.0, NAN]]), equal_nan=True)
    groups, numbers = batch.ids("group_id"), batch.ids("sequence_id")
    assert groups is not None
    assert numbers is not None
    assert (groups.tolist(), numbers.tolist()) == ([7, 7], [2**40, 2**40 + 1])
    assert batch.columns == {"answer": ["0", "1"], "tags": [["a"], ["a"]]}


def test_columns_are_the_loss_s_own_copies() -> None:
    batch = collate(carrying(), CPU)
    assert batch.columns is not None
    batch.columns["tags"][0].append("b")
    assert batch.columns["tags"] == [["a"], ["a"]]
