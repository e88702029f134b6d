"""A loss that breaks its contract is named, and never broadcast into a gradient."""

import signal
import sys

import pytest
import torch
from support.handlers import handlers_kept

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox.errors import RunFailed
from grpox.runtime.signals import Terminated, first_signal_waits, install_handlers
from grpox.update.objective import per_token_loss

SHAPE = (2, 3)


def quits(code):
    sys.exit(code)


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
        (lambda i: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_loss_call.py:27\)"),
        (lambda i: quits(0), r"raised SystemExit: 0 \(test_loss_call.py:\d+\)"),
        (lambda i: LossOutput(-i.logprobs * i.advantages.mul_(2)), "not change advantages in place"),
        (
            lambda i: LossOutput(-i.logprobs * i.token_mask.logical_not_()),
            "not change token_mask in place",
        ),
        (lambda i: LossOutput(i.old_logprobs.sub_(i.logprobs)), "not change old_logprobs in place"),
    ],
)
def test_a_wrong_loss_is_named(make, told):
    with pytest.raises(RunFailed, match=told) as raised:
        call(make)
    assert str(raised.value).startswith("loss 'Mine'")


def test_an_interrupt_of_a_loss_ends_the_run_by_name_and_a_signal_as_a_signal():
    def interrupts(inputs):
        raise KeyboardInterrupt

    def wraps(inputs):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("wrapped") from error

    with handlers_kept():
        install_handlers()
        try:
            with pytest.raises(RunFailed, match=r"loss 'Mine' raised KeyboardInterrupt \(test_loss_call"):
                call(interrupts)
            with first_signal_waits(), pytest.raises(RunFailed, match="loss 'Mine' raised ZeroDivisionError"):
                call(lambda inputs: signal.raise_signal(signal.SIGTERM) or 1 / 0)
            with pytest.raises(Terminated):
                call(wraps)
        finally:
            install_handlers()  # forgets the signals
