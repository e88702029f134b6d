"""A correction that breaks its contract is named."""

import pytest
import torch

from grpox.errors import RunFailed
from grpox.reduction import StepTotals
from grpox.step_loss import MicroBatchInputs, StepLoss
from grpox_losses.configs import ClippedConfig
from grpox_losses.dapo import Dapo


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda old, sampler, mask: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_step_loss.py"),
        (lambda old, sampler, mask: old, r"returned Tensor, not \(weights, keep\)"),
        (lambda old, sampler, mask: (old[:, :1], mask), r"returned weights \(2, 1\) and keep \(2, 3\)"),
        (
            lambda old, sampler, mask: (old, old),
            r"returned weights \(2, 3\) and keep \(2, 3\) of torch.float32",
        ),
    ],
)
def test_a_correction_that_is_none_is_named(make, told):
    class Mine:
        def correct(self, old, sampler, mask):
            return make(old, sampler, mask)

    inputs = MicroBatchInputs(torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3).bool(), torch.ones(2))
    with pytest.raises(RunFailed, match=f"correction 'Mine' {told}"):
        StepLoss(Dapo(ClippedConfig()), Mine()).micro_batch(inputs, StepTotals(6, 2, 1, 3))
