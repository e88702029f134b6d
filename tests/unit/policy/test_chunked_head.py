"""Log-probabilities from hidden states against torch's own log-softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpox.policy import logprobs
from grpox.policy.logprobs import LogitTransform, Wanted, chosen_logprobs

N, H, V = 11, 6, 17
TEMPERATURE = 0.7


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    log_p = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    chosen = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    return chosen, -(log_p.exp() * log_p).sum(dim=1)


@pytest.mark.parametrize("chunk", [V, 3 * V + 5, 10**6], ids=["a token", "three tokens", "all at once"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "transform",
    [LogitTransform(), LogitTransform(0.25), LogitTransform(cap=3.0), LogitTransform(4.0, 3.0)],
    ids=["plain", "scaled", "capped", "scaled and capped"],
)
def test_values_and_gradients_are_those_of_a_log_softmax_over_all_logits(
    monkeypatch: pytest.MonkeyPatch, transform: LogitTransform, bias: bool, chunk: int
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", chunk)
    torch.manual_seed(0)
    inputs = [torch.randn(N, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64)]
    inputs += [torch.randn(V, dtype=torch.float64)] if bias else []
    for tensor in inputs:
        tensor.requires_grad_(True)
    hidden, weight, offset = inputs[0], inputs[1], inputs[2] if bias else None
    targets, upstream = torch.randint(V, (N,)), torch.randn(N, dtype=torch.float64)
    upstream[3] = 0  # as for a clipped token
    expected, expected_entropy = reference(hidden, weight, offset, targets, transform)
    found, entropy = chosen_logprobs(hidden, weight, offset, Wanted(targets, TEMPERATURE, transform))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=0, atol=1e-13)
    assert not entropy.requires_grad
    ours = torch.autograd.grad(found, inputs, upstream)
    for one, other in zip(ours, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_no_token_has_gradients_of_zero() -> None:
    hidden, weight = torch.randn(0, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    wanted = Wanted(torch.empty(0, dtype=torch.long), 1.0, LogitTransform())
    logprobs, _ = chosen_logprobs(hidden, weight, None, wanted)
    for_hidden, for_weight = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    assert for_hidden.shape == (0, H)
    assert not for_weight.any()


def test_half_precision_is_raised_before_the_softmax() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H).bfloat16(), torch.randn(V, H).bfloat16().requires_grad_(True)
    targets = torch.randint(V, (N,))
    found, _ = chosen_logprobs(hidden, weight, None, Wanted(targets, TEMPERATURE, LogitTransform()))
    logits = torch.nn.functional.linear(hidden, weight).float() / TEMPERATURE
    expected = torch.log_softmax(logits, dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), [weight])
    assert gradient.dtype == torch.bfloat16


def test_chunks_shrink_as_the_vocabulary_grows() -> None:
    for vocabulary in (32_000, 256_000):
        parts = logprobs._parts(1000, vocabulary)
        assert sum(part.stop - part.start for part in parts) >= 1000
        assert all((part.stop - part.start) * vocabulary <= logprobs.LOGITS_PER_CHUNK for part in parts)
