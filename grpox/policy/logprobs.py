"""Log-probabilities of the sampled tokens, log softmax(logits / temperature)[token], and the entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpox.policy.batch import Layout, RolloutBatch, lay_out
from grpox.policy.chunked_head import entropy_by_logits
from grpox.policy.forward_modes import FULL_LOGITS, ForwardMode

POSITIONS_PER_CHUNK = 4096
"""Token positions whose probabilities are held at once for the entropy."""


def completion_logprobs(
    model: Callable[..., Any],
    batch: RolloutBatch,
    temperature: float,
    mode: ForwardMode = FULL_LOGITS,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `model` on a micro-batch.

    Args:
        mode: the one that `model` was prepared for.
        entropy_gradient: whether the entropy has a gradient too.

    Returns:
        logprobs f32[B, T] of the completion tokens under the sampling distribution, with gradient unless
        under `torch.no_grad`; entropy f32[B, T] of that distribution. Padded positions hold finite numbers that
        mean nothing.
    """
    if mode == FULL_LOGITS:
        return _of_all_logits(model, batch, temperature, entropy_gradient)
    layout = lay_out(batch, mode.shared_width, mode.packed)
    logprobs, entropies = _rows_logprobs(model, layout, temperature, entropy_gradient)
    whole = logprobs.new_zeros(batch.token_mask.numel())
    return (
        whole.index_copy(0, layout.places, logprobs).view_as(batch.token_mask),
        whole.index_copy(0, layout.places, entropies).view_as(batch.token_mask),
    )


def _rows_logprobs(
    model: Any, layout: Layout, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of the layout's targets, with gradient, and entropies [N]; for a prepared model.

    Args:
        entropy_gradient: whether the entropies have a gradient too.
    """
    made: tuple[Tensor, Tensor] = model(
        input_ids=layout.input_ids,
        position_ids=layout.position_ids,
        attention_mask=layout.sees,
        scored=(layout.sources, layout.targets, temperature, entropy_gradient),
    )
    return made


def _of_all_logits(
    model: Callable[..., Any], batch: RolloutBatch, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    length = batch.token_mask.shape[1]
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
        # The logits at position p predict token p + 1: the last prompt position is needed, the last is not.
        logits_to_keep=length + 1,
    )
    logits = output.logits[:, -length - 1 : -1]  # [B, T, V]
    entropy_of = entropy_with_gradient if entropy_gradient else entropy
    return selective_log_softmax(logits, batch.completion_ids, temperature), entropy_of(logits, temperature)


def selective_log_softmax(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `token_ids`, without a second tensor of the vocabulary's size.

    Args:
        logits: [..., V]; half precision is raised to float32, float64 is kept.
        token_ids: i64[...]

    Returns:
        f32[...] (f64 for float64 logits)
    """
    scaled = _raised(logits) / temperature
    chosen = scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(scaled, dim=-1)


@torch.no_grad()
def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): [B, T, V] -> f32[B, T], in chunks of rows."""
    chunks = []
    for chunk in torch.split(logits, _rows_per_chunk(logits)):
        log_p = torch.log_softmax(_raised(chunk) / temperature, dim=-1)
        chunks.append(torch.special.entr(log_p.exp()).sum(dim=-1))
    return torch.cat(chunks)


def entropy_with_gradient(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """The same with gradient. The backward pass computes the probabilities anew, a chunk of rows at a time."""
    made: Tensor = _Entropy.apply(logits, temperature)  # type: ignore[no-untyped-call]
    return made


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        made = entropy(logits, temperature)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """By z = logits / temperature the derivative of H is -p (log p + H)."""
        logits, made = ctx.saved_tensors
        size = _rows_per_chunk(logits)
        chunks = []
        for chunk, held, upstream in zip(
            *(torch.split(each, size) for each in (logits, made, gradients[0])), strict=True
        ):
            log_p = torch.log_softmax(_raised(chunk) / ctx.temperature, dim=-1)
            by_p = entropy_by_logits(log_p, held).mul_(-upstream.unsqueeze(-1) / ctx.temperature)
            chunks.append(log_p.exp_().mul_(by_p).to(logits.dtype))
        return torch.cat(chunks), None


def _rows_per_chunk(logits: Tensor) -> int:
    return max(1, POSITIONS_PER_CHUNK // max(logits.shape[1], 1))


def _raised(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
