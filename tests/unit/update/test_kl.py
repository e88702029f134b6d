"""The KL estimators against numbers worked by hand and the KL they estimate."""

import pytest
import torch

from grpox.update.objective import KL_ESTIMATORS

# rho = log ref - log pi: ln 2, 0, -ln 2. old: a ratio of 1, 1 and 2.
REFERENCE = torch.tensor([[0.0, -1.0, -1.3862944]], dtype=torch.float64)
LOGPROBS = torch.tensor([[-0.6931472, -1.0, -0.6931472]], dtype=torch.float64)
OLD = torch.tensor([[-0.6931472, -1.0, -1.3862944]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [-0.6931472, 0.0, 0.6931472]),
        ("k2", [0.2402265, 0.0, 0.2402265]),  # (ln 2)^2 / 2
        ("k3", [0.3068528, 0.0, 0.1931472]),  # 2 - ln 2 - 1, 0, 1/2 + ln 2 - 1
        ("unbiased", [0.3068528, 0.0, 0.3862944]),  # k3 times the ratios 1, 1 and 2
    ],
)
def test_by_hand(name, expected):
    assert KL_ESTIMATORS[name](REFERENCE, LOGPROBS, OLD)[0].tolist() == pytest.approx(expected, abs=1e-6)


def exact(kind, logits, reference_logits, old_logits):
    """The expectation over tokens that pi_old samples, and its gradient with respect to the logits."""
    logits = logits.clone().requires_grad_()
    logprobs, reference, old = (torch.log_softmax(x, -1)[None] for x in (logits, reference_logits, old_logits))
    expectation = (old.exp() * KL_ESTIMATORS[kind](reference, logprobs, old)).sum()
    (gradient,) = torch.autograd.grad(expectation, logits)
    return expectation.item(), gradient


def true_kl(logits, reference_logits):
    logits = logits.clone().requires_grad_()
    logprobs, reference = torch.log_softmax(logits, -1), torch.log_softmax(reference_logits, -1)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    (gradient,) = torch.autograd.grad(kl, logits)
    return kl.item(), gradient


LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
OTHER = torch.tensor([0.1, 0.4, -0.5, 0.2], dtype=torch.float64)
STALE = torch.tensor([0.9, -0.2, 0.1, -0.6], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["k1", "k3", "unbiased"])
def test_on_policy_the_value_is_the_kl(kind):
    assert exact(kind, LOGITS, OTHER, LOGITS)[0] == pytest.approx(true_kl(LOGITS, OTHER)[0], rel=1e-12)


def test_the_unbiased_form_has_the_value_and_gradient_of_the_kl_off_policy_too():
    value, gradient = exact("unbiased", LOGITS, OTHER, STALE)
    kl, expected = true_kl(LOGITS, OTHER)
    assert value == pytest.approx(kl, rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(exact("k3", LOGITS, OTHER, STALE)[1], expected, atol=1e-3)


def test_on_policy_k2_has_the_gradient_of_the_kl_and_k1_has_none():
    torch.testing.assert_close(exact("k2", LOGITS, OTHER, LOGITS)[1], true_kl(LOGITS, OTHER)[1])
    torch.testing.assert_close(exact("k1", LOGITS, OTHER, LOGITS)[1], torch.zeros(4, dtype=torch.float64))
