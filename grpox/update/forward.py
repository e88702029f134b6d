"""The forward of one micro-batch: from its tokens to its share of the step's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpox.policy.forward_modes import PLAIN, ForwardWays
from grpox.policy.logprobs import completion_logprobs
from grpox.update.micro_batch import Slice
from grpox.update.reduction import StepTotals
from grpox.update.step_loss import MicroBatchInputs, MicroBatchLoss, StepLoss


@dataclass(frozen=True)
class ForwardPass:
    """What the forward of a micro-batch gave."""

    logprobs: Tensor  # f32[B, T], with gradient where there is one
    entropy: Tensor  # f32[B, T], without gradient
    output: MicroBatchLoss


def forward_pass(
    model: Callable[..., Any],
    slice_: Slice,
    step_loss: StepLoss,
    totals: StepTotals,
    temperature: float,
    ways: ForwardWays = PLAIN,
) -> ForwardPass:
    """Run `model` on a micro-batch. Where pi_old was not fixed before, it is now what this forward computed."""
    batch = slice_.batch
    logprobs, entropy = completion_logprobs(model, batch, temperature, ways, step_loss.entropy_gradient)
    if logprobs.requires_grad:
        logprobs.retain_grad()  # where a loss has no finite derivative, this tells the token
    fixed = slice_.old_logprobs
    if fixed is None:
        slice_.old_logprobs = logprobs.detach()
    inputs = MicroBatchInputs(
        logprobs=logprobs,
        token_mask=batch.token_mask,
        advantages=batch.advantages,
        old_logprobs=fixed,
        sampler_logprobs=batch.sampler_logprobs,
        reference_logprobs=slice_.reference_logprobs,
        entropy=entropy,
        policy_keep=slice_.policy_keep,
    )
    return ForwardPass(logprobs, entropy.detach(), step_loss.micro_batch(inputs, totals))


def terms_of(slice_: Slice, passed: ForwardPass) -> Mapping[str, Tensor]:
    """What the loss of a micro-batch was made of, causes first: name -> f32[B, T] without gradient.

    After the backward pass the derivative with respect to each log-probability too.
    """
    made, reference = passed.output.corrected, slice_.reference_logprobs
    terms = {} if reference is None else {"reference log-probability": reference}
    terms |= {
        "log-probability": passed.logprobs.detach(),
        "old log-probability": made.old,
        "entropy": passed.entropy,
        "advantage": slice_.batch.advantages.unsqueeze(1).expand_as(passed.logprobs),
        "correction R": made.factor,
        "policy loss": passed.output.policy_loss,
    }
    if "kl" in passed.output.diagnostics:
        terms["KL"] = passed.output.diagnostics["kl"]
    if passed.logprobs.grad is not None:
        terms["derivative"] = passed.logprobs.grad
    return terms
