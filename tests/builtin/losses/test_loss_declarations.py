"""Declarations of each loss to the core: its reduction, and the meaning of its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grpox.contracts import LossInputs, PolicyLoss, Reduction
from grpox_losses.configs import (
    CispoConfig,
    ClippedConfig,
    DppoConfig,
    GspoTokenConfig,
    LuspoConfig,
    SapoConfig,
    ToprConfig,
)
from grpox_losses.losses import Bnpo, Cispo, Dapo, DrGrpo, Grpo, Luspo, Sapo
from grpox_losses.surrogates import Dppo, GspoToken, Topr

MakeInputs = Callable[..., LossInputs]
LOSSES = {
    Reduction.SEQUENCE_MEAN: [Grpo(ClippedConfig()), Sapo(SapoConfig()), GspoToken(GspoTokenConfig())],
    Reduction.SEQUENCE_SUM_BY_MAX_LENGTH: [DrGrpo(ClippedConfig())],
    Reduction.TOKEN_MEAN: [Dapo(ClippedConfig()), Cispo(CispoConfig()), Dppo(DppoConfig())],
    Reduction.SEQUENCE_SUM: [Topr(ToprConfig()), Luspo(LuspoConfig())],
    Reduction.LOCAL_TOKEN_MEAN: [Bnpo(ClippedConfig())],
}
ALL = [loss for losses in LOSSES.values() for loss in losses]
each_loss = pytest.mark.parametrize("loss", ALL, ids=lambda loss: type(loss).__name__)


def test_reductions() -> None:
    for reduction, losses in LOSSES.items():
        assert {loss.reduction for loss in losses} == {reduction}


@each_loss
def test_zero_at_zero_advantage_is_true(loss: PolicyLoss, make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[-2.0, 0.0, 2.0]], [[0.0, 0.0, 0.0]])

    values = loss.per_token(inputs).loss

    assert loss.zero_at_zero_advantage
    assert not values.any()
    assert not torch.autograd.grad(values.sum(), inputs.logprobs)[0].any()


@each_loss
def test_shapes_and_dtypes(loss: PolicyLoss, make_inputs: MakeInputs, dtype: torch.dtype) -> None:
    output = loss.per_token(make_inputs([[0.1, -0.1, 0.3]] * 2, [[1.0] * 3, [-1.0] * 3]))

    tensors = [output.loss, *output.diagnostics.values()]
    assert output.loss.shape == (2, 3)
    assert {tensor.shape for tensor in tensors} <= {torch.Size([2, 3]), torch.Size([2])}
    assert {tensor.dtype for tensor in tensors} == {dtype}


@each_loss
def test_a_sequence_does_not_see_its_neighbours(loss: PolicyLoss, make_inputs: MakeInputs) -> None:
    rows, advantages = [[0.1, -0.1], [0.7, 0.9], [-0.6, 0.2]], [[1.0, 1.0], [-2.0, -2.0], [0.5, 0.5]]
    together = loss.per_token(make_inputs(rows, advantages)).loss
    alone = [loss.per_token(make_inputs([r], [a])).loss for r, a in zip(rows, advantages, strict=True)]

    assert torch.equal(together, torch.cat(alone))


@each_loss
def test_a_wholly_masked_batch_gives_zeros_that_are_still_on_the_graph(
    loss: PolicyLoss, make_inputs: MakeInputs
) -> None:
    inputs = make_inputs([[0.4, 0.2]], [[1.0, 1.0]], [[0, 0]])

    values = loss.per_token(inputs).loss

    assert not values.any()
    assert torch.autograd.grad(values.sum(), inputs.logprobs)[0].tolist() == [[0.0, 0.0]]
