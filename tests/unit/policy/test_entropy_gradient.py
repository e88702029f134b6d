"""The gradient of the entropy: from hidden states and from logits, against torch's own and worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from test_chunked_head import CHUNKS, ROWS, TEMPERATURE, N, V, head, reference

from grpox.policy import logprobs
from grpox.policy.logprobs import (
    LogitTransform,
    Wanted,
    chosen_logprobs,
    entropy,
    entropy_with_gradient,
)


@CHUNKS
@ROWS
@pytest.mark.parametrize(
    "transform",
    [LogitTransform(), LogitTransform(0.25), LogitTransform(4.0, 3.0)],
    ids=["plain", "scaled", "scaled and capped"],
)
def test_the_gradient_from_hidden_states_equals_that_over_all_logits(
    monkeypatch: pytest.MonkeyPatch, transform: LogitTransform, chunk: int, reads: bool
) -> None:
    """Beside the log-probabilities' own: some tokens have both, some one, one none."""
    if not reads:
        monkeypatch.setattr(logprobs, "HOST", torch.device("meta"))
    monkeypatch.setattr(logprobs, "chunk_rows", lambda vocabulary, device: max(1, chunk // vocabulary))
    inputs = head(bias=True)
    targets = torch.randint(V, (N,))
    upstream, of_entropy = torch.randn(2, N, dtype=torch.float64)
    upstream[:4], of_entropy[3:6] = 0, 0
    wanted = Wanted(targets, TEMPERATURE, transform, entropy_gradient=True)
    ours = torch.autograd.grad(chosen_logprobs(*inputs, wanted), inputs, [upstream, of_entropy])
    theirs = torch.autograd.grad(reference(*inputs, targets, transform), inputs, [upstream, of_entropy])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("positions", [1, 8, 10**6], ids=["a row", "two rows", "all at once"])
def test_from_logits_it_is_the_difference_of_entropies(monkeypatch: pytest.MonkeyPatch, positions: int) -> None:
    monkeypatch.setattr(logprobs, "POSITIONS_PER_CHUNK", positions)
    logits = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    assert torch.equal(entropy_with_gradient(logits, 0.7), entropy(logits, 0.7))
    assert torch.autograd.gradcheck(lambda tensor: entropy_with_gradient(tensor, 0.7), [logits])


def test_two_tokens_by_hand() -> None:
    """p = [1/4, 3/4]: H grows with the logit of the unlikely token by p q log(q/p), falls as the other's."""
    logits = torch.tensor([[[0.0, math.log(3)]]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy_with_gradient(logits).sum(), logits)
    slope = 3 / 16 * math.log(3)
    torch.testing.assert_close(gradient, torch.tensor([[[slope, -slope]]], dtype=torch.float64))


@pytest.mark.parametrize("upstream", [1.0, 1e6])
def test_tokens_that_cannot_be_have_none(upstream: float) -> None:
    logits = torch.tensor([[[0.0, -torch.inf, 1.0, -1e30]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy_with_gradient(logits) * upstream, logits)
    assert gradient.isfinite().all()
    assert gradient[0, 0, [1, 3]].eq(0).all()


def test_half_precision_is_raised_before_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 50).bfloat16().requires_grad_(True)
    wide = logits.detach().double().requires_grad_(True)
    (gradient,) = torch.autograd.grad(entropy_with_gradient(logits, 0.5).sum(), logits)
    (expected,) = torch.autograd.grad(entropy_with_gradient(wide, 0.5).sum(), wide)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), expected, atol=1e-3, rtol=1e-2)
