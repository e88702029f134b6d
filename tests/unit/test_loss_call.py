"""A loss that breaks its contract is named, and never broadcast into a gradient."""

import pytest
import torch

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox.errors import RunFailed
from grpox.loss_call import per_token_loss

SHAPE = (2, 3)


def call(make):
    class Mine:
        reduction = Reduction.TOKEN_MEAN

        def per_token(self, inputs):
            return make(inputs)

    logprobs = torch.zeros(SHAPE, requires_grad=True)
    ones = torch.ones(SHAPE)
    inputs = LossInputs(logprobs, torch.zeros(SHAPE), ones, ones.bool())
    return per_token_loss(Mine(), inputs)


def test_a_right_loss_passes_through():
    assert call(lambda i: LossOutput(-i.logprobs, {"mine/weight": i.advantages})).loss.shape == SHAPE


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda i: LossOutput(i.logprobs.mean()), r"its loss has shape \(\); \[B, T\] is \(2, 3\)"),
        (lambda i: LossOutput(i.logprobs.sum(1, keepdim=True)), r"its loss has shape \(2, 1\)"),
        (lambda i: LossOutput(i.logprobs.detach()), "does not depend on the log-probabilities"),
        (lambda i: i.logprobs, "returned a Tensor; per_token returns a LossOutput"),
        (lambda i: LossOutput(3.0), "its loss is a float, not a tensor"),
        (lambda i: LossOutput(-i.logprobs, {"x": i.logprobs[:1]}), r"diagnostic 'x' has shape \(1, 3\)"),
        (lambda i: LossOutput(-i.logprobs, {"loss": i.logprobs}), "'loss' is a metric of grpox's own"),
        (lambda i: LossOutput(-i.logprobs, {"sampling/kl": i.logprobs}), "'sampling/kl' is a metric"),
        (lambda i: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_loss_call.py:18\)"),
    ],
)
def test_a_wrong_loss_is_named(make, told):
    with pytest.raises(RunFailed, match=told) as raised:
        call(make)
    assert str(raised.value).startswith("loss 'Mine'")
