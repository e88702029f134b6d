"""The checks of `grpox plugins check`, with the formula of arXiv 2507.20673 written a second time."""

import math
from statistics import mean

from grpox.testing import LossConformance

CLIP = 0.4  # the default


def paper(logprobs, old_logprobs, advantages):
    """The loss of each token of a sequence: -(prod_t r_t)^(1/n) A, each r_t clipped on the side of its A."""
    product = 1.0
    for new, old, advantage in zip(logprobs, old_logprobs, advantages, strict=True):
        ratio = math.exp(new - old)
        product *= min(ratio, math.exp(CLIP)) if advantage > 0 else max(ratio, math.exp(-CLIP))
    return [-(product ** (1 / len(logprobs))) * advantage for advantage in advantages]


def sequence_mean(losses):
    return mean(sum(row) / len(row) for row in losses)


class TestGmpoLoss(LossConformance):
    component = "gmpo"
    reference = staticmethod(paper)
    reduction = staticmethod(sequence_mean)
