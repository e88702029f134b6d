"""Log-probabilities, entropy and its gradient against torch's own, and the alignment of tokens with logits."""

import math
from types import SimpleNamespace

import pytest
import torch

from grpox.contracts import Rollout
from grpox.policy import logprobs
from grpox.policy.batch import collate, samples_of
from grpox.policy.logprobs import completion_logprobs, entropy, entropy_with_gradient, selective_log_softmax


def test_two_token_vocabulary_by_hand():
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
def test_agrees_with_log_softmax_in_value_and_gradient(dtype):
    logits = (5 * torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits.requires_grad_()
    ids = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(1))
    ours = selective_log_softmax(logits, ids, 0.7)
    (gradient,) = torch.autograd.grad(ours.sum(), logits)
    wide = logits.detach().double().requires_grad_()
    theirs = (wide / 0.7).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    (expected,) = torch.autograd.grad(theirs.sum(), wide)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # bfloat16 rounds the gradient it returns
    torch.testing.assert_close(gradient.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("positions", [1, 8, 10**6], ids=["a row", "two rows", "all at once"])
def test_the_gradient_of_the_entropy_is_the_difference_of_entropies(monkeypatch, positions):
    monkeypatch.setattr(logprobs, "POSITIONS_PER_CHUNK", positions)
    logits = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    assert torch.equal(entropy_with_gradient(logits, 0.7), entropy(logits, 0.7))
    assert torch.autograd.gradcheck(lambda tensor: entropy_with_gradient(tensor, 0.7), [logits])


@pytest.mark.parametrize("upstream", [1.0, 1e6])
def test_impossible_tokens_add_no_entropy_and_have_no_gradient(upstream):
    assert entropy(torch.tensor([[[0.0, -torch.inf, 0.0]]])).item() == pytest.approx(math.log(2))
    logits = torch.tensor([[[0.0, -torch.inf, 1.0, -1e30]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy_with_gradient(logits) * upstream, logits)
    assert gradient.isfinite().all()
    assert gradient[0, 0, [1, 3]].eq(0).all()


def test_the_entropy_of_half_precision_is_of_a_float32_softmax():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 50).bfloat16().requires_grad_(True)
    wide = logits.detach().double().requires_grad_(True)
    (gradient,) = torch.autograd.grad(entropy_with_gradient(logits, 0.5).sum(), logits)
    (expected,) = torch.autograd.grad(entropy_with_gradient(wide, 0.5).sum(), wide)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), expected, atol=1e-3, rtol=1e-2)


def test_each_completion_token_is_read_from_the_logits_of_the_position_before_it():
    """A model that predicts `token + 1` with near certainty, whatever the padding."""

    def successor(input_ids, logits_to_keep, **_):
        logits = 50 * torch.nn.functional.one_hot((input_ids + 1) % 9, 9).float()
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])

    rollouts = [
        Rollout(0, 0, (1,), (2, 3, 4), "stop", 0),
        Rollout(0, 1, (4, 5, 6), (7, 1), "stop", 0),
    ]
    batch = collate(samples_of(rollouts, [1.0, -1.0]), torch.device("cpu"))
    logprobs, _ = completion_logprobs(successor, batch, temperature=1.0)
    assert logprobs[0].tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert logprobs[1, :2].tolist() == pytest.approx([0, -50], abs=1e-6)
