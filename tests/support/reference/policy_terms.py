"""The loss of every token of one completion: minus what the papers maximise, before their 1/G and 1/|o_i|."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .completion import Completion


def token_ratios(completion: Completion) -> list[Tensor]:
    """w_t = pi / pi_old of each token (GRPO, arXiv 2402.03300)."""
    return [torch.exp(token.logprob - token.old) for token in completion]


def sequence_ratios(completion: Completion) -> list[Tensor]:
    """s = (pi(o) / pi_old(o)) ** (1/|o|), the same at each token (GSPO, arXiv 2507.18071)."""
    if not completion:
        return []
    log_ratio = torch.zeros((), dtype=torch.float64)
    for token in completion:
        log_ratio = log_ratio + (token.logprob - token.old)
    return [torch.exp(log_ratio / len(completion))] * len(completion)


def clipped(
    completion: Completion,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    delta: float | None = None,
    level: str = "token",
) -> list[Tensor]:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A).

    GRPO has one epsilon; DAPO (arXiv 2503.14476) two. With `delta` the first w is min(w, delta): two-sided
    clipping of INTELLECT-2 (arXiv 2505.07291).
    """
    ratios = {"token": token_ratios, "sequence": sequence_ratios}[level](completion)
    upper = 1 + (clip_low if clip_high is None else clip_high)
    terms = []
    for token, w in zip(completion, ratios, strict=True):
        first = w if delta is None else least(w, delta)
        second = greatest(least(w, upper), 1 - clip_low)
        terms.append(-least(first * token.advantage, second * token.advantage))
    return terms


def cispo(completion: Completion, cap: float = 5.0) -> list[Tensor]:
    """-sg[min(w, cap)] A log pi (MiniMax-M1, arXiv 2506.13585); the weight is a float: it has no gradient."""
    terms = []
    for token in completion:
        weight = min(math.exp(token.logprob.item() - token.old), cap)
        terms.append(-weight * token.advantage * token.logprob)
    return terms


def sapo(completion: Completion, tau_pos: float = 1.0, tau_neg: float = 1.05) -> list[Tensor]:
    """-A (4/tau) sigmoid(tau (w - 1)), tau by the sign of A (SAPO, arXiv 2511.20347)."""
    terms = []
    for token, w in zip(completion, token_ratios(completion), strict=True):
        tau = tau_pos if token.advantage > 0 else tau_neg
        gate = 1 / (1 + torch.exp(-tau * (w - 1)))
        terms.append(-token.advantage * (4 / tau) * gate)
    return terms


def least(a: Tensor, b: Tensor | float) -> Tensor:
    """min(a, b) with the gradient of the one that it is; of `a` where they are equal."""
    return a if a <= b else torch.as_tensor(b, dtype=torch.float64)


def greatest(a: Tensor, b: float) -> Tensor:
    """max(a, b) with the gradient of the one that it is; of `a` where they are equal."""
    return a if a >= b else torch.tensor(b, dtype=torch.float64)
