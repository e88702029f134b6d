"""The formulas of the papers, in plain Python, one sequence or batch at a time.

A loss: (log-probabilities, old ones, advantages, mask) of a sequence -> the loss of each token. An advantage:
(rewards, N lists of K, weights, groups) -> N numbers. A correction: (old, sampler, mask) of a sequence -> its
weights, 0 where dropped. A reward: (completion, its token ids, the row's columns) -> a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

Row = Sequence[float]
LossReference = Callable[[Row, Row, Row, Sequence[bool]], list[float]]


def clipped(low: float, high: float) -> LossReference:
    """PPO's clipped surrogate, arXiv 1707.06347, eq. 7; of DAPO 0.2 and 0.28."""

    def losses(logprobs: Row, old: Row, advantages: Row, mask: Sequence[bool]) -> list[float]:
        ratios = [math.exp(new - before) for new, before in zip(logprobs, old, strict=True)]
        return [_surrogate(w, a, low, high) for w, a in zip(ratios, advantages, strict=True)]

    return losses


def gspo(low: float, high: float) -> LossReference:
    """GSPO, arXiv 2507.18071, eq. 5 to 7."""

    def losses(logprobs: Row, old: Row, advantages: Row, mask: Sequence[bool]) -> list[float]:
        ratio = math.exp(_mean_log_ratio(logprobs, old, mask))
        return [_surrogate(ratio, a, low, high) for a in advantages]

    return losses


def gmpo(clip: float) -> LossReference:
    """GMPO, arXiv 2507.20673, eq. 5."""

    def losses(logprobs: Row, old: Row, advantages: Row, mask: Sequence[bool]) -> list[float]:
        logs = [
            min(new - before, clip) if a > 0 else max(new - before, -clip)
            for new, before, a, counts in zip(logprobs, old, advantages, mask, strict=True)
            if counts
        ]
        return [-math.exp(mean(logs)) * a if logs else 0.0 for a in advantages]

    return losses


def sapo(tau_pos: float, tau_neg: float) -> LossReference:
    """SAPO, arXiv 2511.20347, eq. 6."""

    def loss(w: float, a: float) -> float:
        tau = tau_pos if a > 0 else tau_neg
        return -a * 4 / tau / (1 + math.exp(-tau * (w - 1)))

    def losses(logprobs: Row, old: Row, advantages: Row, mask: Sequence[bool]) -> list[float]:
        ratios = [math.exp(new - before) for new, before in zip(logprobs, old, strict=True)]
        return [loss(w, a) for w, a in zip(ratios, advantages, strict=True)]

    return losses


def cispo(cap: float) -> LossReference:
    """CISPO, arXiv 2506.13585, eq. 4; the value, whose weight has no gradient."""

    def losses(logprobs: Row, old: Row, advantages: Row, mask: Sequence[bool]) -> list[float]:
        return [
            -min(math.exp(new - before), cap) * a * new
            for new, before, a in zip(logprobs, old, advantages, strict=True)
        ]

    return losses


def capped(cap: float) -> LossReference:
    """Policy gradient with a truncated ratio: -min(w, cap) A."""

    def losses(logprobs: Row, old: Row, advantages: Row, mask: Sequence[bool]) -> list[float]:
        return [
            -min(math.exp(new - before), cap) * a
            for new, before, a in zip(logprobs, old, advantages, strict=True)
        ]

    return losses


def prefix(low: float, high: float) -> LossReference:
    """Clipped surrogate of the product of the ratios up to each token."""

    def losses(logprobs: Row, old: Row, advantages: Row, mask: Sequence[bool]) -> list[float]:
        total, result = 0.0, []
        for new, before, a, counts in zip(logprobs, old, advantages, mask, strict=True):
            total += (new - before) if counts else 0.0
            result.append(_surrogate(math.exp(total), a, low, high))
        return result

    return losses


def centred(rewards: Sequence[Row], weights: Row, groups: Sequence[int]) -> list[float]:
    """Dr. GRPO, arXiv 2503.20783: the reward less the mean of its group."""
    return _by_group(rewards, weights, groups, lambda own, all_: own - mean(all_))


def leave_one_out(rewards: Sequence[Row], weights: Row, groups: Sequence[int]) -> list[float]:
    """RLOO, arXiv 2402.14740, eq. 8: the reward less the mean of the others."""

    def advantage(own: float, all_: Sequence[float]) -> float:
        return own - (sum(all_) - own) / (len(all_) - 1) if len(all_) > 1 else 0.0

    return _by_group(rewards, weights, groups, advantage)


def standardised(rewards: Sequence[Row], weights: Row, groups: Sequence[int]) -> list[float]:
    """GRPO, arXiv 2402.03300, section 4.1.2: the standard score within the group."""

    def advantage(own: float, all_: Sequence[float]) -> float:
        return (own - mean(all_)) / (stdev(all_) + 1e-4) if len(all_) > 1 and max(all_) > min(all_) else 0.0

    return _by_group(rewards, weights, groups, advantage)


def ranked(rewards: Sequence[Row], weights: Row, groups: Sequence[int]) -> list[float]:
    """Rank in the group: the completions that are worse less those that are better, over the group's size."""

    def advantage(own: float, all_: Sequence[float]) -> float:
        return (sum(each < own for each in all_) - sum(each > own for each in all_)) / len(all_)

    return _by_group(rewards, weights, groups, advantage)


def token_truncate(cap: float) -> Callable[[Row, Row, Sequence[bool]], list[float]]:
    """Truncated importance sampling (Yao et al. 2025): min(pi_old / mu, cap)."""

    def weights(old: Row, sampler: Row, mask: Sequence[bool]) -> list[float]:
        return [min(math.exp(a - b), cap) for a, b in zip(old, sampler, strict=True)]

    return weights


def sequence_truncate(cap: float) -> Callable[[Row, Row, Sequence[bool]], list[float]]:
    """Sequence-level truncation: min(prod pi_old / mu, cap)."""

    def weights(old: Row, sampler: Row, mask: Sequence[bool]) -> list[float]:
        total = sum(a - b for a, b, counts in zip(old, sampler, mask, strict=True) if counts)
        return [min(math.exp(total), cap)] * len(mask)

    return weights


def icepop(low: float, high: float) -> Callable[[Row, Row, Sequence[bool]], list[float]]:
    """IcePop, arXiv 2510.18855: pi_old / mu within the band, else 0."""

    def weights(old: Row, sampler: Row, mask: Sequence[bool]) -> list[float]:
        ratios = [math.exp(a - b) for a, b in zip(old, sampler, strict=True)]
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]

    return weights


def overlong(completion: str, completion_ids: Sequence[int], columns: Mapping[str, Any]) -> float:
    """DAPO, arXiv 2503.14476, eq. 13, with a longest length of 8 and a buffer of 4."""
    length = len(completion_ids)
    return 0.0 if length <= 4 else max(-1.0, (4 - length) / 4)


def exact(completion: str, completion_ids: Sequence[int], columns: Mapping[str, Any]) -> float | None:
    """1 where the completion is the answer, but for white space at its ends; None where there is no answer."""
    answer = columns["answer"]
    return None if answer is None else float(completion.strip() == str(answer))


def _surrogate(w: float, a: float, low: float, high: float) -> float:
    return -min(w * a, min(max(w, 1 - low), 1 + high) * a)


def _mean_log_ratio(logprobs: Row, old: Row, mask: Sequence[bool]) -> float:
    logs = [new - before for new, before, counts in zip(logprobs, old, mask, strict=True) if counts]
    return mean(logs) if logs else 0.0


def _by_group(
    rewards: Sequence[Row],
    weights: Row,
    groups: Sequence[int],
    advantage: Callable[[float, Sequence[float]], float],
) -> list[float]:
    totals = [_total(row, weights) for row in rewards]
    result = []
    for own, group in zip(totals, groups, strict=True):
        members = [
            total for total, other in zip(totals, groups, strict=True) if other == group and total is not None
        ]
        result.append(0.0 if own is None else advantage(own, members))
    return result


def _total(row: Row, weights: Row) -> float | None:
    scores = [(score, weight) for score, weight in zip(row, weights, strict=True) if not math.isnan(score)]
    return sum(score * weight for score, weight in scores) if scores else None
