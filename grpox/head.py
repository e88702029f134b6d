"""Log-probabilities and entropies straight from hidden states, without a tensor of [tokens, vocabulary].

The logits of a few tokens at a time are computed, used and dropped; the backward pass computes them again. The
memory that takes does not grow with the vocabulary: with a larger one the chunks have fewer tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOGITS_PER_CHUNK = 2**23
"""Logits held at once: 32 MiB of float32, large enough for products at full speed."""


@dataclass(frozen=True)
class LogitTransform:
    """What a model makes of its head's output z: ``cap * tanh(scale * z / cap)``, with no cap ``scale * z``."""

    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True)
class Wanted:
    """Which log-probabilities are wanted of a head: of `targets` i64[N], one for each of its input rows."""

    targets: Tensor
    temperature: float
    transform: LogitTransform


def chosen_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution in nats.

    Args:
        hidden: [N, H]
        weight: [V, H] of the head; bias: [V] or None.

    Returns:
        log-probabilities [N] with gradient, entropy [N] without; float32, or float64 for a float64 model.
    """
    made: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(hidden, weight, bias, wanted)  # type: ignore[no-untyped-call]
    return made


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _parts(len(hidden), len(weight)):
            logits = _logits(hidden[part], weight, bias, wanted)
            lse = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(1, wanted.targets[part].unsqueeze(1)).squeeze(1) - lse
            log_p = logits.sub_(lse.unsqueeze(1))
            entropy[part] = -torch.linalg.vecdot(log_p.exp(), log_p.clamp_(min=torch.finfo(dtype).min))
            normaliser[part] = lse
        ctx.wanted = wanted
        ctx.save_for_backward(hidden, weight, bias, normaliser)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Of log p = z_target - lse the derivative by z is onehot(target) - p."""
        hidden, weight, bias, normaliser = ctx.saved_tensors
        wanted, upstream = ctx.wanted, gradients[0]
        for_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if ctx.needs_input_grad[2] else None
        live = upstream.nonzero().squeeze(1)  # clipped tokens have no gradient
        for part in _parts(len(live), len(weight)):
            places = live[part]
            inputs = hidden[places]
            gradient = _by_logits(
                _logits(inputs, weight, bias, wanted), normaliser[places], upstream[places], places, wanted
            )
            by_output = gradient.to(weight.dtype)
            if for_hidden is not None:
                for_hidden[places] = by_output @ weight
            if for_weight is not None and for_weight.dtype == weight.dtype:
                for_weight.addmm_(by_output.T, inputs)
            elif for_weight is not None:
                for_weight += by_output.T @ inputs
            if for_bias is not None:
                for_bias += gradient.sum(dim=0)
        return (
            for_hidden,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            None,
        )


def _parts(tokens: int, vocabulary: int) -> list[slice]:
    """Slices of `tokens` whose logits are held at once."""
    size = max(1, LOGITS_PER_CHUNK // vocabulary)
    return [slice(begin, begin + size) for begin in range(0, tokens, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted) -> Tensor:
    """Logits over the temperature, half precision raised to float32: [n, H] -> [n, V]."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    transform = wanted.transform
    if transform.cap is None:
        factor = transform.scale / wanted.temperature
        return logits if factor == 1 else logits.mul_(factor)
    return logits.mul_(transform.scale / transform.cap).tanh_().mul_(transform.cap / wanted.temperature)


def _by_logits(logits: Tensor, normaliser: Tensor, upstream: Tensor, places: Tensor, wanted: Wanted) -> Tensor:
    """The gradient by the head's output: [n, V] -> [n, V]. `logits` is overwritten."""
    transform, temperature = wanted.transform, wanted.temperature
    slope: Tensor | float = transform.scale / temperature
    if transform.cap is not None:
        # d(cap * tanh(scale * z / cap)) / dz = scale * (1 - tanh^2)
        tanh = logits * (temperature / transform.cap)
        slope = (1 - tanh.square_()).mul_(slope)
    gradient = logits.sub_(normaliser.unsqueeze(1)).exp_().mul_(-upstream.unsqueeze(1))
    gradient[torch.arange(len(places), device=places.device), wanted.targets[places]] += upstream
    return gradient if isinstance(slope, float) and math.isclose(slope, 1) else gradient.mul_(slope)
