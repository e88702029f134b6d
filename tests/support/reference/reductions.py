"""Terms of tokens -> the loss of one optimizer step; `step[k][i]` is completion i of micro-batch k."""

from __future__ import annotations

import torch
from torch import Tensor

Terms = list[Tensor]
"""One number for each token of a completion."""
Step = list[list[Terms]]


def token_mean(step: Step, max_completion_length: int) -> Tensor:
    """1 / sum_i |o_i|  sum_i sum_t (DAPO, arXiv 2503.14476)."""
    tokens = sum(len(terms) for terms in completions(step))
    return total([total(terms) for terms in completions(step)]) / max(tokens, 1)


def sequence_mean(step: Step, max_completion_length: int) -> Tensor:
    """1/N sum_i 1/|o_i| sum_t (GRPO, arXiv 2402.03300)."""
    means = [total(terms) / max(len(terms), 1) for terms in completions(step)]
    return total(means) / max(len(means), 1)


def sequence_sum_by_max_length(step: Step, max_completion_length: int) -> Tensor:
    """1/N sum_i 1/L sum_t with a constant L (Dr. GRPO, arXiv 2503.20783)."""
    sums = [total(terms) / max_completion_length for terms in completions(step)]
    return total(sums) / max(len(sums), 1)


def local_token_mean(step: Step, max_completion_length: int) -> Tensor:
    """The mean over micro-batches of each one's mean over its tokens."""
    means = []
    for micro_batch in step:
        tokens = sum(len(terms) for terms in micro_batch)
        means.append(total([total(terms) for terms in micro_batch]) / max(tokens, 1))
    return total(means) / max(len(means), 1)


def completions(step: Step) -> list[Terms]:
    return [terms for micro_batch in step for terms in micro_batch]


def total(terms: list[Tensor]) -> Tensor:
    return sum(terms, start=torch.zeros((), dtype=torch.float64))
