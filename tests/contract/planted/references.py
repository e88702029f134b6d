"""The formulas of the papers in plain Python, as `grpox.testing.same_as` takes them.

A loss: lists of a sequence's tokens -> the loss of each token, or of a surrogate its gradient. An advantage:
rewards of N completions, weights, groups -> N numbers. A correction: lists of a completion's tokens -> (weight,
keep) of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean, stdev

Row = Sequence[float]
Loss = Callable[[Row, Row, Row], list[float]]
Correction = Callable[[Row, Row], list[tuple[float, bool]]]
Rewards = Sequence[Sequence[float | None]]


def token_mean(losses: Sequence[Row]) -> float:
    """DAPO, arXiv 2503.14476, eq. 8: every token of the step has the same weight."""
    return sum(map(sum, losses)) / sum(map(len, losses))


def sequence_mean(losses: Sequence[Row]) -> float:
    """GRPO, arXiv 2402.03300, eq. 3: every sequence has the same weight."""
    return mean(sum(row) / len(row) for row in losses)


def _of_tokens(loss: Callable[[float, float], float]) -> Loss:
    """Make a formula of a function of one token's ratio and advantage."""

    def losses(logprobs: Row, old_logprobs: Row, advantages: Row) -> list[float]:
        return [loss(w, a) for w, a in zip(_ratios(logprobs, old_logprobs), advantages, strict=True)]

    return losses


def clipped(low: float, high: float) -> Loss:
    """PPO's clipped surrogate, arXiv 1707.06347, eq. 7; of DAPO 0.2 and 0.28."""
    return _of_tokens(lambda w, a: _surrogate(w, a, low, high))


def dual_clipped(logprobs: Row, old_logprobs: Row, advantages: Row) -> list[float]:
    """GRPO whose loss is bounded at 3 |A| for negative advantages, arXiv 1912.09729, eq. 8."""
    losses = clipped(0.2, 0.2)(logprobs, old_logprobs, advantages)
    return [min(loss, -3 * a) if a < 0 else loss for loss, a in zip(losses, advantages, strict=True)]


topr_gradient = _of_tokens(lambda w, a: -(1.0 if a > 0 else min(1.0, w)) * a)
"""TOPR, arXiv 2503.14286: ratios are bounded by 1 where the advantage is negative, else 1."""


def gspo(low: float, high: float) -> Loss:
    """GSPO, arXiv 2507.18071, eq. 5 to 7."""

    def losses(logprobs: Row, old_logprobs: Row, advantages: Row) -> list[float]:
        ratio = _geometric_mean(logprobs, old_logprobs)
        return [_surrogate(ratio, a, low, high) for a in advantages]

    return losses


def gspo_token_gradient(low: float, high: float) -> Loss:
    """GSPO-token, arXiv 2507.18071, eq. 17: the gradient, -s_i A unless the clip takes it away."""

    def gradients(logprobs: Row, old_logprobs: Row, advantages: Row) -> list[float]:
        ratio = _geometric_mean(logprobs, old_logprobs)
        return [0.0 if (ratio > 1 + high if a > 0 else ratio < 1 - low) else -ratio * a for a in advantages]

    return gradients


def gmpo(clip: float) -> Loss:
    """GMPO, arXiv 2507.20673, eq. 5."""

    def losses(logprobs: Row, old_logprobs: Row, advantages: Row) -> list[float]:
        logs = [
            min(new - old, clip) if a > 0 else max(new - old, -clip)
            for new, old, a in zip(logprobs, old_logprobs, advantages, strict=True)
        ]
        return [-math.exp(mean(logs)) * a for a in advantages]

    return losses


def sapo(tau_pos: float, tau_neg: float) -> Loss:
    """SAPO, arXiv 2511.20347, eq. 6."""

    def loss(w: float, a: float) -> float:
        tau = tau_pos if a > 0 else tau_neg
        return -a * 4 / tau * (1 + math.tanh(tau * (w - 1) / 2)) / 2

    return _of_tokens(loss)


def capped(cap: float) -> Loss:
    """Policy gradient with a truncated ratio, -min(w, cap) A; the gradient of CISPO (arXiv 2506.13585)."""
    return _of_tokens(lambda w, a: -min(w, cap) * a)


def prefix(low: float, high: float) -> Loss:
    """Clipped surrogate of the product of the ratios up to each token."""

    def losses(logprobs: Row, old_logprobs: Row, advantages: Row) -> list[float]:
        total, result = 0.0, []
        for new, old, a in zip(logprobs, old_logprobs, advantages, strict=True):
            total += new - old
            result.append(_surrogate(math.exp(total), a, low, high))
        return result

    return losses


def with_reference(logprobs: Row, old_logprobs: Row, advantages: Row, reference_logprobs: Row) -> list[float]:
    """Policy gradient with the KL penalty k3 (arXiv 2402.03300, eq. 4) of weight 0.04."""
    return [
        -w * a + 0.04 * (math.exp(ref - new) - (ref - new) - 1)
        for w, a, ref, new in zip(
            _ratios(logprobs, old_logprobs), advantages, reference_logprobs, logprobs, strict=True
        )
    ]


def with_entropy(logprobs: Row, old_logprobs: Row, advantages: Row, entropy: Row) -> list[float]:
    """Policy gradient with an entropy bonus of weight 0.01."""
    ratios = _ratios(logprobs, old_logprobs)
    return [-w * a - 0.01 * h for w, a, h in zip(ratios, advantages, entropy, strict=True)]


def pairwise(
    logprobs: Sequence[Row], old_logprobs: Sequence[Row], advantages: Sequence[Row], group_ids: Sequence[int]
) -> list[list[float]]:
    """For each worse completion of its group -log sigmoid of a tenth of the difference of their log-ratios."""
    scores = [sum(new) - sum(old) for new, old in zip(logprobs, old_logprobs, strict=True)]
    quality = [mean(row) if row else 0.0 for row in advantages]
    pairs = list(zip(scores, quality, group_ids, strict=True))
    losses = [
        sum(math.log(1 + math.exp(-0.1 * (s - t))) for t, r, h in pairs if h == g and q > r)
        for s, q, g in pairs
    ]
    return [[loss] * len(row) for loss, row in zip(losses, logprobs, strict=True)]


def _of_group(advantage: Callable[[float, Row], float]) -> Callable[[Rewards, Row, Sequence[int]], list[float]]:
    """Make a formula of a function of a completion's weighted reward and those of its group."""

    def advantages(rewards: Rewards, weights: Row, groups: Sequence[int]) -> list[float]:
        pairs = [(_total(row, weights), group) for row, group in zip(rewards, groups, strict=True)]
        members = {
            group: [own for own, other in pairs if other == group and own is not None] for group in groups
        }
        return [0.0 if own is None else advantage(own, members[group]) for own, group in pairs]

    return advantages


@_of_group
def centred(own: float, all_: Row) -> float:
    """Dr. GRPO, arXiv 2503.20783: the reward less the mean of its group."""
    return own - mean(all_)


@_of_group
def leave_one_out(own: float, all_: Row) -> float:
    """RLOO, arXiv 2402.14740, eq. 8: the reward less the mean of the others."""
    return own - (sum(all_) - own) / (len(all_) - 1) if len(all_) > 1 else 0.0


@_of_group
def standardised(own: float, all_: Row) -> float:
    """GRPO, arXiv 2402.03300, section 4.1.2: the standard score within the group."""
    return (own - mean(all_)) / (stdev(all_) + 1e-4) if len(all_) > 1 and max(all_) > min(all_) else 0.0


@_of_group
def ranked(own: float, all_: Row) -> float:
    """Rank in the group: the completions that are worse less those that are better, over the group's size."""
    return (sum(each < own for each in all_) - sum(each > own for each in all_)) / len(all_)


def token_truncate(cap: float) -> Correction:
    """Truncated importance sampling (Yao et al. 2025): min(pi_old / mu, cap)."""
    return lambda old, sampler: [(min(ratio, cap), True) for ratio in _ratios(old, sampler)]


def sequence_truncate(cap: float) -> Correction:
    """Sequence-level truncation: min(prod pi_old / mu, cap)."""
    return lambda old, sampler: [(min(math.prod(_ratios(old, sampler)), cap), True)] * len(old)


def icepop(low: float, high: float) -> Correction:
    """IcePop, arXiv 2510.18855: pi_old / mu within the band, else dropped."""
    return lambda old, sampler: [(ratio, low <= ratio <= high) for ratio in _ratios(old, sampler)]


def overlong(completion_ids: Sequence[int]) -> float:
    """DAPO, arXiv 2503.14476, eq. 13, with a longest length of 8 and a buffer of 4."""
    length = len(completion_ids)
    return 0.0 if length <= 4 else (4 - length) / 4 if length <= 8 else -1.0


def exact(completion: str, answer: str) -> float:
    """1 where the completion is the answer, but for white space at its ends."""
    return float(completion.strip() == answer)


def cosine(step: int, total_steps: int) -> float:
    """Cosine decay to 0 (arXiv 1608.03983, eq. 5, one period)."""
    return 0.5 * (1 + math.cos(math.pi * step / total_steps))


def linear(step: int, total_steps: int) -> float:
    """Linear decay to 0."""
    return 1 - step / total_steps


def _ratios(new: Row, old: Row) -> list[float]:
    return [math.exp(a - b) for a, b in zip(new, old, strict=True)]


def _geometric_mean(new: Row, old: Row) -> float:
    return math.prod(_ratios(new, old)) ** (1 / len(new)) if new else 1.0


def _surrogate(w: float, a: float, low: float, high: float) -> float:
    return -min(w * a, min(max(w, 1 - low), 1 + high) * a)


def _total(row: Sequence[float | None], weights: Row) -> float | None:
    scores = [score * weight for score, weight in zip(row, weights, strict=True) if score is not None]
    return sum(scores) if scores else None


GRPO, DAPO = clipped(0.2, 0.2), clipped(0.2, 0.28)
GSPO, WIDE_GSPO = gspo(3e-4, 4e-4), gspo(0.2, 0.2)
GRADIENT, PREFIX = capped(float("inf")), prefix(0.2, 0.2)
CISPO, SAPO = capped(5.0), sapo(1.0, 1.05)
TIS, ICEPOP = token_truncate(2.0), icepop(0.5, 5.0)
SEQUENCE_TIS = sequence_truncate(2.0)

REDUCTIONS = {
    **dict.fromkeys((DAPO, CISPO), token_mean),
    **dict.fromkeys((GSPO, WIDE_GSPO, SAPO, pairwise), sequence_mean),
}
"""Formula of a loss -> the reduction of its paper, where the components here have no other on purpose."""
