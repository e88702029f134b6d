"""KL(pi || ref) of each token, estimated from tokens that the policy sampled; rho = log ref - log pi.

Source: Schulman, "Approximating KL divergence" (2020), for k1, k2 and k3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

KlEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(reference, logprobs, old) f32[B, T] each -> f32[B, T]; the gradient is that with respect to logprobs."""


def k1(reference: Tensor, logprobs: Tensor, old: Tensor) -> Tensor:
    """``-rho``: unbiased in value, of high variance, negative for half of the tokens."""
    return logprobs - reference


def k2(reference: Tensor, logprobs: Tensor, old: Tensor) -> Tensor:
    """``rho^2 / 2``: biased in value, with the right gradient on-policy."""
    return (reference - logprobs).square() / 2


def k3(reference: Tensor, logprobs: Tensor, old: Tensor) -> Tensor:
    """``exp(rho) - rho - 1``: unbiased in value and never negative (GRPO, arXiv 2402.03300, eq. 4)."""
    rho = reference - logprobs
    return torch.expm1(rho) - rho


def unbiased(reference: Tensor, logprobs: Tensor, old: Tensor) -> Tensor:
    """``(pi / pi_old) k3``, the ratio neither clipped nor detached (DeepSeek-V3.2, arXiv 2512.02556).

    Its gradient is that of the KL also for tokens that an older policy sampled; k3's own is not, and grows
    without bound for tokens that the policy has come to think unlikely.
    """
    return (logprobs - old).exp() * k3(reference, logprobs, old)


KL_ESTIMATORS: Mapping[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3, "unbiased": unbiased}
"""What `train.kl` names."""
