"""The composed step: keep * R * loss + beta * kl of each token, reduced over the step; loss and gradient.

`step_gradient` takes what `grpox.testing.step_gradient` takes. Ranks do not appear: the loss of a step is
defined over all of its completions, wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import corrections, kl_terms, masks, policy_terms, reductions
from .completion import Completion, Token

Component = str | Mapping[str, Any]
"""A name, or a mapping of `name` and parameters."""
MicroBatch = Mapping[str, Tensor]

LOSSES: dict[str, tuple[Callable[..., list[Tensor]], Callable[[reductions.Step, int], Tensor]]] = {
    "grpo": (policy_terms.clipped, reductions.sequence_mean),
    "dr_grpo": (policy_terms.clipped, reductions.sequence_sum_by_max_length),
    "dapo": (policy_terms.clipped, reductions.token_mean),
    "bnpo": (policy_terms.clipped, reductions.local_token_mean),
    "cispo": (policy_terms.cispo, reductions.token_mean),
    "sapo": (policy_terms.sapo, reductions.sequence_mean),
}
CORRECTIONS: dict[str, Callable[..., list[float]]] = {
    "none": corrections.none,
    "token-truncate": corrections.token_truncate,
    "token-mask": corrections.token_mask,
    "sequence-truncate": corrections.sequence_truncate,
    "sequence-mask": corrections.sequence_mask,
    "geometric-mask": corrections.geometric_mask,
}
KL: dict[str, Callable[[Token], Tensor]] = {
    "k1": kl_terms.k1,
    "k2": kl_terms.k2,
    "k3": kl_terms.k3,
    "unbiased": kl_terms.unbiased,
}


def step_gradient(
    loss: Component,
    micro_batches: Sequence[MicroBatch],
    *,
    correction: Component = "none",
    beta: float = 0.0,
    kl: str = "k3",
    entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0,
    off_policy_mask_threshold: float | None = None,
    max_completion_length: int,
    world_size: int = 1,
) -> tuple[Tensor, list[Tensor]]:
    """Loss and, for each micro-batch, the gradient of its log-probabilities: f64[], f64[B, T] each."""
    loss_name, loss_parameters = parts(loss)
    correction_name, correction_parameters = parts(correction)
    policy_term, reduction = LOSSES[loss_name]
    leaves = [micro_batch["logprobs"].detach().clone().requires_grad_() for micro_batch in micro_batches]
    pairs = zip(micro_batches, leaves, strict=True)
    rows = [completions(micro_batch, logprobs) for micro_batch, logprobs in pairs]
    every = [token for micro_batch in rows for completion in micro_batch for token in completion]
    least = masks.quantile([token.entropy for token in every], 1 - top_entropy_quantile)
    step: reductions.Step = []
    for micro_batch in rows:
        step.append([])
        for completion in micro_batch:
            losses = policy_term(completion, **loss_parameters)
            weights = CORRECTIONS[correction_name](completion, **correction_parameters)
            terms = [weight * term for weight, term in zip(weights, losses, strict=True)]
            if top_entropy_quantile < 1:
                terms = masks.top_entropy(terms, completion, least)
            if off_policy_mask_threshold is not None:
                terms = masks.off_policy(terms, completion, off_policy_mask_threshold)
            if beta > 0:
                terms = [t + beta * KL[kl](token) for t, token in zip(terms, completion, strict=True)]
            step[-1].append(terms)
    value = reduction(step, max_completion_length)
    if entropy_coef:
        value = value - entropy_coef * sum(token.entropy for token in every) / max(len(every), 1)
    if not value.requires_grad:  # no token, or none that is not clipped
        return value, [torch.zeros_like(leaf) for leaf in leaves]
    gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return value.detach(), list(gradients)


def parts(component: Component) -> tuple[str, dict[str, Any]]:
    """Name and parameters of a component as a run file holds it."""
    if isinstance(component, str):
        return component, {}
    return component["name"], {key: value for key, value in component.items() if key != "name"}


def completions(micro_batch: MicroBatch, logprobs: Tensor) -> list[Completion]:
    """The rows as completions: masked positions are not tokens of the model and are left out."""
    rows, columns = logprobs.shape
    return [
        [token(micro_batch, logprobs, i, t) for t in range(columns) if micro_batch["token_mask"][i, t]]
        for i in range(rows)
    ]


def token(micro_batch: MicroBatch, logprobs: Tensor, i: int, t: int) -> Token:
    """Token t of row i; an advantage of a row is that of each of its tokens."""
    advantages = micro_batch["advantages"]
    fields = {"sampler": "sampler_logprobs", "ref": "ref_logprobs", "entropy": "entropy"}
    optional = {field: float(micro_batch[key][i, t]) for field, key in fields.items() if key in micro_batch}
    return Token(
        logprob=logprobs[i, t],
        old=float(micro_batch["old_logprobs"][i, t]),
        advantage=float(advantages[i] if advantages.dim() == 1 else advantages[i, t]),
        **optional,
    )
