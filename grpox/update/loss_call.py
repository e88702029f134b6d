"""One call of a policy loss: whatever it does wrong is told with its name, not broadcast into a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, PolicyLoss
from grpox.errors import RunFailed
from grpox.plugins.component_call import call, unchanged

RESERVED = frozenset(
    {"loss", "grad_norm", "learning_rate", "entropy", "kl", "kl_old", "ratio", "off_policy_masked"}
)
"""Metrics of the core's own, which a diagnostic may not overwrite; nor may it begin with ``sampling/``."""


def per_token_loss(policy_loss: PolicyLoss, inputs: LossInputs) -> LossOutput:
    """The loss of every token.

    Raises:
        RunFailed: it raised, changed a tensor of `inputs` in place, or returned anything but a `LossOutput` of
            [B, T] tensors that the gradient of the log-probabilities can flow through.
    """
    name = type(policy_loss).__name__
    with unchanged("loss", policy_loss.per_token, vars(inputs)):
        output = call("loss", policy_loss.per_token, inputs)
    if not isinstance(output, LossOutput):
        raise RunFailed(f"loss '{name}' returned a {type(output).__name__}; per_token returns a LossOutput")
    _check_tensor(name, "its loss", output.loss, inputs)
    if inputs.logprobs.requires_grad and not output.loss.requires_grad:
        raise RunFailed(f"loss '{name}' does not depend on the log-probabilities: it would train nothing")
    for diagnostic, values in output.diagnostics.items():
        if diagnostic in RESERVED or diagnostic.startswith("sampling/"):
            raise RunFailed(f"loss '{name}': '{diagnostic}' is a metric of grpox's own; rename the diagnostic")
        _check_tensor(name, f"diagnostic '{diagnostic}'", values, inputs)
    return output


def _check_tensor(name: str, what: str, values: object, inputs: LossInputs) -> None:
    expected = tuple(inputs.logprobs.shape)
    if not isinstance(values, Tensor):
        raise RunFailed(f"loss '{name}': {what} is a {type(values).__name__}, not a tensor of shape {expected}")
    if values.shape != inputs.logprobs.shape:
        raise RunFailed(f"loss '{name}': {what} has shape {tuple(values.shape)}; [B, T] is {expected}")
    if what == "its loss" and not torch.is_floating_point(values):
        raise RunFailed(f"loss '{name}': {what} is of {values.dtype}, not of a floating-point type")
