"""Log-probabilities, from logits and hidden states, and entropy against torch's own: values and gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.peak_memory import peak_bytes
from torch import Tensor

from grpox.contracts import Rollout
from grpox.policy import logprobs
from grpox.policy.batch import collate, samples_of
from grpox.policy.head_chunks import BYTES_PER_LOGIT, rows_per_chunk
from grpox.policy.logprobs import (
    LogitTransform,
    Wanted,
    chosen_logprobs,
    completion_logprobs,
    entropy,
    entropy_with_gradient,
    selective_log_softmax,
)

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


CHUNKS = pytest.mark.parametrize("chunk", [V, 3 * V + 5, 10**6], ids=["a token", "three tokens", "all at once"])
ROWS = pytest.mark.parametrize("reads", [True, False], ids=["rows with a gradient", "all rows"])


def head(bias: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw hidden states, the head's weight, and its bias if it has one."""
    torch.manual_seed(0)
    shapes = [(N, H), (V, H), *([(V,)] if bias else [])]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch, chunk: int, reads: bool) -> None:
    monkeypatch.setattr(logprobs, "chunk_rows", lambda vocabulary, device: max(1, chunk // vocabulary))
    if not reads:
        monkeypatch.setattr(logprobs, "HOST", torch.device("meta"))


@CHUNKS
@ROWS
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "transform",
    [LogitTransform(), LogitTransform(0.25), LogitTransform(cap=3.0), LogitTransform(4.0, 3.0)],
    ids=["plain", "scaled", "capped", "scaled and capped"],
)
@pytest.mark.parametrize(("dtype", "far"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=["f64", "f32"])
@pytest.mark.usefixtures("chunked")
def test_values_and_gradients_are_those_of_a_log_softmax_over_all_logits(
    transform: LogitTransform, bias: bool, dtype: torch.dtype, far: float
) -> None:
    inputs = head(bias, dtype)
    hidden, weight, offset = inputs[0], inputs[1], inputs[2] if bias else None
    targets = torch.randint(V, (N,))
    upstream, of_entropy = torch.randn(2, N, dtype=torch.float64)
    upstream[3] = 0  # as for a clipped token
    if dtype == torch.float32 and transform == LogitTransform(4.0, 3.0):
        far *= 4  # tanh is close to 1 here, so that its derivative, 1 - tanh^2, loses digits
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected, expected_entropy = reference(exact[0], exact[1], exact[2] if bias else None, targets, transform)
    found, spread = chosen_logprobs(hidden, weight, offset, Wanted(targets, TEMPERATURE, transform))
    assert found.dtype == spread.dtype == dtype
    assert relative(found, expected) < far
    assert relative(spread, expected_entropy) < far
    assert not spread.requires_grad
    ours = torch.autograd.grad(found, inputs, upstream.to(dtype))
    theirs = torch.autograd.grad(expected, exact, upstream, retain_graph=True)
    for one, other in zip(ours, theirs, strict=True):
        assert relative(one, other) < far
    # Both gradients: some tokens have both, some one, one none.
    upstream[:4], of_entropy[3:6] = 0, 0
    wanted = Wanted(targets, TEMPERATURE, transform, entropy_gradient=True)
    both = chosen_logprobs(hidden, weight, offset, wanted)
    ours = torch.autograd.grad(both, inputs, [upstream.to(dtype), of_entropy.to(dtype)])
    theirs = torch.autograd.grad((expected, expected_entropy), exact, [upstream, of_entropy])
    for one, other in zip(ours, theirs, strict=True):
        assert relative(one, other) < far


def relative(actual: Tensor, expected: Tensor) -> float:
    """The length of the difference, as a part of the length of the expected values."""
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


@CHUNKS
@ROWS
@pytest.mark.usefixtures("chunked")
def test_bfloat16_has_float32_logits_and_a_gradient_rounded_once() -> None:
    """Against float64 with the same rounded inputs: float32's accuracy in values, one rounding in gradients."""
    rounded = head(bias=True, dtype=torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in rounded]
    targets, upstream = torch.randint(V, (N,)), torch.randn(N)
    upstream[3] = 0
    found, spread = chosen_logprobs(*rounded, Wanted(targets, TEMPERATURE, LogitTransform()))
    expected, expected_entropy = reference(*exact, targets, LogitTransform())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=2e-6)
    torch.testing.assert_close(spread, expected_entropy.float(), rtol=0, atol=2e-6)
    gradients = torch.autograd.grad(found, rounded, upstream)
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
    for one, other in zip(gradients, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert relative(one, other) < 2**-8


def test_an_adapter_of_the_head_in_bfloat16_is_added_in_float32() -> None:
    hidden, weight = head(bias=False, dtype=torch.bfloat16)
    low, up = torch.randn(N, 3).bfloat16().requires_grad_(), torch.randn(V, 3).bfloat16().requires_grad_()
    targets = torch.randint(V, (N,))
    rounded = [hidden, weight, low, up]
    exact = [each.detach().double().requires_grad_() for each in rounded]
    found, _ = chosen_logprobs(hidden, weight, None, Wanted(targets, 1.0, LogitTransform()), low, up)
    logits = exact[0] @ exact[1].T + exact[2] @ exact[3].T
    expected = torch.log_softmax(logits, dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=5e-6)
    ours, theirs = (torch.autograd.grad(each.sum(), own) for each, own in ((found, rounded), (expected, exact)))
    assert all(relative(one, other) < 2**-8 for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("raised", [True, False], ids=["factors in float32", "float32 results of bfloat16"])
def test_no_value_is_read_off_the_host(monkeypatch: pytest.MonkeyPatch, raised: bool) -> None:
    """On the meta device every read fails; CUDA's products, with `out_dtype`, have a form there too."""
    if not raised:
        monkeypatch.setattr(logprobs, "as_factor", lambda tensor: tensor)
    sizes = [(N, H), (V, H), (V,), (N, 3), (V, 3)]
    inputs = [torch.empty(size, dtype=torch.bfloat16, device="meta", requires_grad=True) for size in sizes]
    targets = torch.empty(N, dtype=torch.long, device="meta")
    wanted = Wanted(targets, TEMPERATURE, LogitTransform(), entropy_gradient=True)
    found, spread = chosen_logprobs(*inputs[:3], wanted, *inputs[3:])
    assert found.dtype == spread.dtype == torch.float32
    gradients = torch.autograd.grad(found.sum() + spread.sum(), inputs)
    assert [(each.shape, each.dtype) for each in gradients] == [(each.shape, each.dtype) for each in inputs]


@pytest.mark.parametrize(
    ("transform", "entropy_gradient", "bytes_per_logit"),
    [
        (LogitTransform(0.25), False, BYTES_PER_LOGIT),
        (LogitTransform(0.25), True, BYTES_PER_LOGIT),
        (LogitTransform(cap=3.0), False, BYTES_PER_LOGIT),
        (LogitTransform(cap=3.0), True, 12),
    ],
    ids=["plain", "entropy bonus", "capped", "capped, entropy bonus"],
)
def test_no_more_is_in_memory_than_planned(
    monkeypatch: pytest.MonkeyPatch, transform: LogitTransform, entropy_gradient: bool, bytes_per_logit: int
) -> None:
    rows, vocabulary = 16, 4096
    monkeypatch.setattr(logprobs, "chunk_rows", lambda vocabulary, device: rows)
    hidden, weight = torch.randn(4 * rows, H, requires_grad=True), torch.randn(vocabulary, H)
    wanted = Wanted(torch.randint(vocabulary, (4 * rows,)), TEMPERATURE, transform, entropy_gradient)
    results: list[Tensor] = []
    forward = peak_bytes(lambda: results.extend(chosen_logprobs(hidden, weight, None, wanted)))
    total = results[0].sum() + (results[1].sum() if entropy_gradient else 0)
    backward = peak_bytes(lambda: total.backward())
    # The rest, per row: log-probabilities, entropies, and the gradient by the hidden states.
    assert BYTES_PER_LOGIT <= forward / (rows * vocabulary) < BYTES_PER_LOGIT + 0.1
    assert backward / (rows * vocabulary) < bytes_per_logit + 0.1


def test_no_token_has_gradients_of_zero() -> None:
    hidden, weight = torch.randn(0, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    wanted = Wanted(torch.empty(0, dtype=torch.long), 1.0, LogitTransform())
    found, _ = chosen_logprobs(hidden, weight, None, wanted)
    for_hidden, for_weight = torch.autograd.grad(found.sum(), [hidden, weight])
    assert for_hidden.shape == (0, H)
    assert not for_weight.any()


@pytest.mark.parametrize(
    ("vocabulary", "gib", "rows"),
    [
        (32_768, None, 256),  # a CPU
        (2**24, None, 1),
        (128_000, 80, 2048),  # 2^28 logits are 2097 rows
        (151_936, 80, 1536),  # ... 1766 rows
        (32_000, 80, 8192),  # the most
        (256_000, 80, 1024),  # ... 1048 rows
        (32_000, 16, 2048),  # 2^26 logits, a 32nd of the memory, are 2097 rows
        (151_936, 16, 1024),  # the least, where that share is 441 rows
    ],
)
def test_chunks_fit_the_memory_and_are_large_enough_for_a_gpus_products(
    vocabulary: int, gib: int | None, rows: int
) -> None:
    assert rows_per_chunk(vocabulary, gib and gib * 2**30) == rows


def test_two_token_vocabulary_by_hand() -> None:
    # softmax([0, ln 3]) = [1/4, 3/4]; at temperature 1/2 the logits double: [1/10, 9/10].
    logits = torch.tensor([[[0.0, math.log(3)]]])
    assert selective_log_softmax(logits, torch.tensor([[1]])).item() == pytest.approx(math.log(3 / 4))
    assert selective_log_softmax(logits, torch.tensor([[0]]), 0.5).item() == pytest.approx(math.log(1 / 10))
    by_hand = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy(logits).item() == pytest.approx(by_hand)
    # H grows with the logit of the unlikely token by p q log(q/p), and falls as the other's.
    logits = logits.double().requires_grad_()
    (gradient,) = torch.autograd.grad(entropy_with_gradient(logits).sum(), logits)
    slope = 3 / 16 * math.log(3)
    assert gradient.flatten().tolist() == pytest.approx([slope, -slope])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_agrees_with_log_softmax_in_value_and_gradient(dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits.requires_grad_()
    ids = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(1))
    wide = logits.detach().double().requires_grad_()
    ours = selective_log_softmax(logits, ids, 0.7), entropy_with_gradient(logits, 0.7)
    every = (wide / 0.7).log_softmax(-1)
    theirs = every.gather(-1, ids[..., None])[..., 0], -(every.exp() * every).sum(-1)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # bfloat16 rounds the gradient it returns
    for found, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        (expected,) = torch.autograd.grad(exact.sum(), wide, retain_graph=True)
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("positions", [1, 8, 10**6], ids=["a row", "two rows", "all at once"])
def test_the_gradient_of_the_entropy_is_the_difference_of_entropies(
    monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    monkeypatch.setattr(logprobs, "POSITIONS_PER_CHUNK", positions)
    logits = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    assert torch.equal(entropy_with_gradient(logits, 0.7), entropy(logits, 0.7))
    assert torch.autograd.gradcheck(lambda tensor: entropy_with_gradient(tensor, 0.7), [logits])


@pytest.mark.parametrize("upstream", [1.0, 1e6])
def test_impossible_tokens_add_no_entropy_and_have_no_gradient(upstream: float) -> None:
    assert entropy(torch.tensor([[[0.0, -torch.inf, 0.0]]])).item() == pytest.approx(math.log(2))
    logits = torch.tensor([[[0.0, -torch.inf, 1.0, -1e30]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy_with_gradient(logits) * upstream, logits)
    assert gradient.isfinite().all()
    assert gradient[0, 0, [1, 3]].eq(0).all()


def test_each_completion_token_is_read_from_the_logits_of_the_position_before_it() -> None:
    """A model that predicts `token + 1` with near certainty, whatever the padding."""

    def successor(input_ids: Tensor, logits_to_keep: int, **_: Any) -> Any:
        logits = 50 * torch.nn.functional.one_hot((input_ids + 1) % 9, 9).float()
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])

    rollouts = [
        Rollout(0, 0, (1,), (2, 3, 4), "stop", 0),
        Rollout(0, 1, (4, 5, 6), (7, 1), "stop", 0),
    ]
    batch = collate(samples_of(rollouts, [1.0, -1.0]), torch.device("cpu"))
    found, _ = completion_logprobs(successor, batch, temperature=1.0)  # type: ignore[arg-type]
    assert found[0].tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert found[1, :2].tolist() == pytest.approx([0, -50], abs=1e-6)
