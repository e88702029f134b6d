"""Log-probabilities of the sampled tokens, log softmax(logits / temperature)[token], and the entropy.

They are computed from all logits of a model, or, by an installed forward pass, from its hidden states without
a tensor [tokens, vocabulary]: it computes, uses and drops the logits of a few tokens at a time, and the
backward pass computes them again. The memory does not grow with the vocabulary, because a larger vocabulary
means fewer tokens per chunk.

Half-precision weights and hidden states are multiplied with float32 results, because a logit in bfloat16 is off
by up to one part in 512.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpox.policy.batch import PackedBatch
from grpox.policy.head_chunks import rows_per_chunk
from grpox.policy.lora.layers import ADAPTER

POSITIONS_PER_CHUNK = 4096
"""Number of token positions whose probabilities are in memory at once for the entropy."""
HOST = torch.device("cpu")
LEAST_LOG_P = -1e4
"""Log-probability below which a probability is 0 in every precision, so its factor only has to be finite."""


def completion_logprobs(
    model: Callable[..., Any],
    batch: PackedBatch,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `model` on a micro-batch.

    Args:
        model: has the forward mode of the batch installed.
        entropy_gradient: True if the entropy also needs a gradient.

    Returns:
        logprobs f32[B, T] of the completion tokens under the sampling distribution, with gradient unless
        under `torch.no_grad`; entropy f32[B, T] of that distribution. Padded positions have arbitrary
        finite numbers.
    """
    if batch.mode.chunked:
        scored = (batch.sources, batch.targets, temperature, entropy_gradient)
        logprobs, entropies = model(**batch.model_inputs(), scored=scored)
        return batch.as_rows(logprobs), batch.as_rows(entropies)
    length = batch.token_mask.shape[1]
    # The logits at position p predict token p + 1: the last prompt position is needed, the last is not.
    output = model(**batch.model_inputs(), use_cache=False, logits_to_keep=length + 1)
    logits, ids = output.logits[:, -length - 1 : -1], batch.input_ids[:, -length:]  # [B, T, V], [B, T]
    entropy_of = entropy_with_gradient if entropy_gradient else entropy
    return selective_log_softmax(logits, ids, temperature), entropy_of(logits, temperature)


def selective_log_softmax(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute log softmax(logits / temperature) at `token_ids`, without a second tensor of the same size.

    Args:
        logits: [..., V]; half precision is raised to float32, float64 is kept.
        token_ids: i64[...]

    Returns:
        f32[...] (f64 for float64 logits)
    """
    scaled = raised(logits) / temperature
    chosen = scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(scaled, dim=-1)


@torch.no_grad()
def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the entropy in nats of softmax(logits / temperature): [B, T, V] -> f32[B, T], in chunks of
    rows."""
    chunks = []
    for chunk in torch.split(logits, _rows_per_chunk(logits)):
        log_p = torch.log_softmax(raised(chunk) / temperature, dim=-1)
        chunks.append(torch.special.entr(log_p.exp()).sum(dim=-1))
    return torch.cat(chunks)


def entropy_with_gradient(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the entropy with gradient; the backward pass recomputes the probabilities in chunks of rows."""
    result: Tensor = _Entropy.apply(logits, temperature)  # type: ignore[no-untyped-call]
    return result


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        entropies = entropy(logits, temperature)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, entropies)
        return entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Use the derivative of H by z = logits / temperature: -p (log p + H)."""
        logits, entropies = ctx.saved_tensors
        size = _rows_per_chunk(logits)
        chunks = []
        for chunk, entropy_of_chunk, upstream in zip(
            *(torch.split(each, size) for each in (logits, entropies, gradients[0])), strict=True
        ):
            log_p = torch.log_softmax(raised(chunk) / ctx.temperature, dim=-1)
            by_p = entropy_by_logits(log_p, entropy_of_chunk).mul_(-upstream.unsqueeze(-1) / ctx.temperature)
            chunks.append(log_p.exp_().mul_(by_p).to(logits.dtype))
        return torch.cat(chunks), None


def _rows_per_chunk(logits: Tensor) -> int:
    return max(1, POSITIONS_PER_CHUNK // max(logits.shape[1], 1))


def raised(logits: Tensor) -> Tensor:
    """Raise half precision to float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True)
class LogitTransform:
    """Transform of a head's output z to logits: ``cap * tanh(scale * z / cap)``; without cap ``scale * z``."""

    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True)
class Wanted:
    """Request for the log-probabilities of `targets` i64[N], one for each input row of a head."""

    targets: Tensor
    temperature: float
    transform: LogitTransform
    entropy_gradient: bool = False
    """True if the entropies also need a gradient."""


def score_in_model(model: Any, transform: LogitTransform) -> None:
    """Make the forward of a model accept `scored`, and return log-probabilities and entropies, f32[N] each.

    `scored` holds the sources and targets of a `PackedBatch`, the temperature, and True if the entropies also
    need a gradient.
    """
    head, body, whole = model.get_output_embeddings(), model.base_model, model.forward

    # The signature stays the model's, because transformers' generate reads it.
    @functools.wraps(whole)
    def forward(*args: Any, scored: tuple[Tensor, Tensor, float, bool] | None = None, **inputs: Any) -> Any:
        if scored is None:
            return whole(*args, **inputs)
        sources, targets, temperature, entropy_gradient = scored
        hidden = body(**inputs, use_cache=False).last_hidden_state
        rows = hidden.flatten(0, 1).index_select(0, sources)
        return head(rows, wanted=Wanted(targets, temperature, transform, entropy_gradient))

    model.forward = forward


def score_in_head(head: Any) -> None:
    """Make the forward of a head accept `wanted` and return log-probabilities and entropies for it."""
    linear = head.forward

    # Within the head's own forward ZeRO-3 has gathered its weight, and gathers it for the backward pass.
    @functools.wraps(linear)
    def forward(input: Tensor, wanted: Wanted | None = None) -> Any:
        return linear(input) if wanted is None else chosen_logprobs(input, head.weight, head.bias, wanted)

    head.forward = forward


def score_in_adapted_head(head: Any) -> None:
    """Do as `score_in_head` for a head with an adapter, without storing the merged weight.

    The logits of a few tokens are ``h W^T + (scale * h A^T) B^T``; the inner size of the second product is the
    rank. W and B are parameters of two layers. The forward of one layer calls the forward of the other, so
    ZeRO-3 gathers both before the logits are computed, and again before the backward pass recomputes them.
    """
    base, down, up = head.base_layer, head.lora_A[ADAPTER], head.lora_B[ADAPTER]
    whole, base_linear, up_linear = head.forward, base.forward, up.forward

    @functools.wraps(whole)
    def forward(input: Tensor, *args: Any, wanted: Wanted | None = None, **options: Any) -> Any:
        if wanted is None:
            return whole(input, *args, **options)
        low = None if head.disable_adapters else down(input) * head.scaling[ADAPTER]
        return base(input, wanted=wanted, low=low)

    @functools.wraps(base_linear)
    def base_forward(input: Tensor, wanted: Wanted | None = None, low: Tensor | None = None) -> Any:
        if wanted is None:
            return base_linear(input)
        score = functools.partial(chosen_logprobs, input, base.weight, base.bias, wanted)
        return score() if low is None else up(low, score=score)

    @functools.wraps(up_linear)
    def up_forward(input: Tensor, score: Callable[..., Any] | None = None) -> Any:
        return up_linear(input) if score is None else score(input, up.weight)

    head.forward, base.forward, up.forward = forward, base_forward, up_forward


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Wanted,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(logits / temperature) at the targets, and the entropy in nats.

    Args:
        hidden: [N, H]
        weight: [V, H] of the head; bias: [V] or None.
        low, up: [N, r] and [V, r] whose product is added to the logits, as the adapter of a head does.

    Returns:
        log-probabilities [N] with gradient, entropy [N] with gradient if `wanted` requests it; float32, or
        float64 for a float64 model.
    """
    result: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(hidden, weight, bias, wanted, low, up)  # type: ignore[no-untyped-call]
    return result


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Wanted,
        low: Tensor | None,
        up: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        factors = _factors(hidden, weight, bias, low, up)
        size = chunk_rows(len(weight), weight.device)
        for begin in range(0, len(hidden), size):
            part = slice(begin, begin + size)
            logits = _logits(_rows(factors, part), wanted)
            lse = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(1, wanted.targets[part].unsqueeze(1)).squeeze(1) - lse
            log_p = logits.sub_(lse.unsqueeze(1))
            p = log_p.exp()
            entropy[part] = -p.mul_(log_p.clamp_(min=torch.finfo(dtype).min)).sum(dim=-1)
            normaliser[part] = lse
            # Freed before the next chunk, so that no more than BYTES_PER_LOGIT are in use.
            del logits, log_p, p
        ctx.wanted = wanted
        ctx.save_for_backward(hidden, weight, bias, low, up, normaliser, entropy)
        if not wanted.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Use the derivatives by z: log p = z_target - lse gives onehot(target) - p; H gives -p (log p + H)."""
        hidden, weight, bias, low, up, normaliser, entropy = ctx.saved_tensors
        wanted, (upstream, of_entropy) = ctx.wanted, gradients
        needs_hidden, needs_weight, needs_bias, _, needs_low, needs_up = ctx.needs_input_grad
        for_hidden = torch.zeros_like(hidden) if needs_hidden else None
        for_low = torch.zeros_like(low) if needs_low else None
        for_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if needs_weight else None
        for_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if needs_bias else None
        for_up = torch.zeros_like(up, dtype=normaliser.dtype) if needs_up else None
        taught = upstream != 0
        if wanted.entropy_gradient:
            taught |= of_entropy != 0
        # On the host, rows without a gradient, such as clipped tokens, are skipped. On another device they are
        # multiplied by 0: to find them, the host would have to wait for the device.
        live = taught.nonzero().squeeze(1) if taught.device == HOST else None
        factors, size = _factors(hidden, weight, bias, low, up), chunk_rows(len(weight), weight.device)
        for begin in range(0, len(taught) if live is None else len(live), size):
            part = slice(begin, begin + size)
            rows = part if live is None else live[part]
            chunk = _rows(factors, rows)
            by_entropy = (of_entropy[rows], entropy[rows]) if wanted.entropy_gradient else None
            of_chunk = normaliser[rows], upstream[rows], wanted.targets[rows]
            gradient = _by_logits(_logits(chunk, wanted), *of_chunk, wanted, by_entropy)
            # Rounded to the weight's precision, because a product needs factors of one type.
            by_output = as_factor(gradient.to(weight.dtype))
            if for_hidden is not None:
                for_hidden[rows] = multiply(by_output, factors.weight).to(hidden.dtype)
            if for_low is not None and factors.up is not None:
                for_low[rows] = multiply(by_output, factors.up).to(low.dtype)
            add_product(for_weight, by_output.T, chunk.hidden)
            add_product(for_up, by_output.T, chunk.low)
            if for_bias is not None:
                for_bias += gradient.sum(dim=0)
            del gradient, by_output
        return (
            for_hidden,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            None,
            for_low,
            None if for_up is None else for_up.to(up.dtype),
        )


class _Factors(NamedTuple):
    """Factors of the products of a head, each in the type in which it is multiplied."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    low: Tensor | None  # [N, r]
    up: Tensor | None  # [V, r]


def _factors(hidden: Tensor, weight: Tensor, *others: Tensor | None) -> _Factors:
    rest = [None if each is None else as_factor(each) for each in others]
    return _Factors(as_factor(hidden), as_factor(weight), *rest)


def _rows(factors: _Factors, rows: slice | Tensor) -> _Factors:
    low = None if factors.low is None else factors.low[rows]
    return factors._replace(hidden=factors.hidden[rows], low=low)


def as_factor(tensor: Tensor) -> Tensor:
    """Convert a factor so that its products are float32 (float64 for float64 factors).

    CUDA multiplies half precision with float32 results. On other devices the result would be rounded to half
    precision, so the factors are raised before; the product of two bfloat16 numbers is exact in float32.
    """
    return tensor if tensor.device.type == "cuda" else raised(tensor)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two factors: [n, m], [m, k] -> f32[n, k]."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32)


def add_product(total: Tensor | None, left: Tensor, right: Tensor | None) -> None:
    """Add the product of two factors to `total` f32[n, k], if there is one, in place."""
    if total is None or right is None:
        return
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


@functools.cache
def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Choose once for a device how many rows of logits are in memory together."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return rows_per_chunk(vocabulary, memory)


def _logits(factors: _Factors, wanted: Wanted) -> Tensor:
    """Compute logits / temperature: [n, H] -> f32[n, V]."""
    hidden, weight, bias, low, up = factors
    if hidden.dtype in (torch.float32, torch.float64):
        logits = torch.nn.functional.linear(hidden, weight, bias)
    else:
        logits = multiply(hidden, weight.T)
        logits = logits if bias is None else logits.add_(bias)
    if low is not None and up is not None:
        add_product(logits, low, up.T)
    transform = wanted.transform
    if transform.cap is None:
        factor = transform.scale / wanted.temperature
        return logits if factor == 1 else logits.mul_(factor)
    return logits.mul_(transform.scale / transform.cap).tanh_().mul_(transform.cap / wanted.temperature)


def entropy_by_logits(log_p: Tensor, entropy: Tensor) -> Tensor:
    """Compute the factor of -p in the derivative of the entropy by the logits: [..., V], [...] -> [..., V]."""
    return log_p.clamp(min=LEAST_LOG_P).add_(entropy.unsqueeze(-1))


def _by_logits(
    logits: Tensor,
    normaliser: Tensor,
    upstream: Tensor,
    targets: Tensor,
    wanted: Wanted,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute the gradient by the head's output: [n, V] -> [n, V]. `logits` is overwritten.

    Args:
        of_entropy: incoming gradient of the entropies, and the entropies, [n] each.
    """
    transform, temperature = wanted.transform, wanted.temperature
    slope: Tensor | float = transform.scale / temperature
    if transform.cap is not None:
        # d(cap * tanh(scale * z / cap)) / dz = scale * (1 - tanh^2)
        tanh = logits * (temperature / transform.cap)
        slope = tanh.square_().neg_().add_(1).mul_(slope)
    log_p, by_p = logits.sub_(normaliser.unsqueeze(1)), -upstream.unsqueeze(1)
    if of_entropy is not None:
        by_p = entropy_by_logits(log_p, of_entropy[1]).mul_(-of_entropy[0].unsqueeze(1)).add_(by_p)
    gradient = log_p.exp_().mul_(by_p)
    gradient.scatter_add_(1, targets.unsqueeze(1), upstream.unsqueeze(1))
    return gradient if isinstance(slope, float) and math.isclose(slope, 1) else gradient.mul_(slope)
