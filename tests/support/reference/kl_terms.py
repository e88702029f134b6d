"""Estimators of KL(pi || ref) from one token of pi, with rho = log ref - log pi."""

from __future__ import annotations

import torch
from torch import Tensor

from .completion import Token


def k1(token: Token) -> Tensor:
    """-rho"""
    return token.logprob - token.ref


def k2(token: Token) -> Tensor:
    """rho**2 / 2"""
    rho = token.ref - token.logprob
    return rho * rho / 2


def k3(token: Token) -> Tensor:
    """ref/pi - log(ref/pi) - 1 (GRPO, arXiv 2402.03300)."""
    rho = token.ref - token.logprob
    return torch.exp(rho) - rho - 1


def unbiased(token: Token) -> Tensor:
    """(pi/pi_old) k3: k3 weighted for tokens that pi_old sampled, with the gradient of the weight."""
    return torch.exp(token.logprob - token.old) * k3(token)
