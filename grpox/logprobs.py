"""Log-probabilities of the sampled tokens, log softmax(logits / temperature)[token], and the entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpox.forward_ways import PLAIN, ForwardWays, rows_logprobs
from grpox.layout import lay_out
from grpox.rollout import RolloutBatch

POSITIONS_PER_CHUNK = 4096
"""Token positions whose probabilities are held at once for the entropy."""


def completion_logprobs(
    model: Callable[..., Any], batch: RolloutBatch, temperature: float, ways: ForwardWays = PLAIN
) -> tuple[Tensor, Tensor]:
    """Run `model` on a micro-batch.

    Args:
        ways: those that `model` was prepared for.

    Returns:
        logprobs f32[B, T] of the completion tokens under the sampling distribution, with gradient unless
        under `torch.no_grad`; entropy f32[B, T] of that distribution, without gradient. Padded positions
        hold finite numbers that mean nothing.
    """
    if ways == PLAIN:
        return _of_all_logits(model, batch, temperature)
    layout = lay_out(batch, ways.shared_width)
    logprobs, entropies = rows_logprobs(model, layout, temperature)
    places = batch.token_mask.flatten().nonzero().squeeze(1)
    whole = logprobs.new_zeros(batch.token_mask.numel())
    return (
        whole.index_copy(0, places, logprobs).view_as(batch.token_mask),
        whole.index_copy(0, places, entropies).view_as(batch.token_mask),
    )


def _of_all_logits(model: Callable[..., Any], batch: RolloutBatch, temperature: float) -> tuple[Tensor, Tensor]:
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
    return selective_log_softmax(logits, batch.completion_ids, temperature), entropy(logits, temperature)


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
    for chunk in torch.split(logits, max(1, POSITIONS_PER_CHUNK // max(logits.shape[1], 1))):
        log_p = torch.log_softmax(_raised(chunk) / temperature, dim=-1)
        chunks.append(torch.special.entr(log_p.exp()).sum(dim=-1))
    return torch.cat(chunks)


def _raised(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
