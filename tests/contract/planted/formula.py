"""Components that compute another formula than the paper's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import references as paper
import skeletons
import torch
from references import CISPO, DAPO, GRPO, GSPO, SAPO, SEQUENCE_TIS, TIS, WIDE_GSPO
from skeletons import by_group, clipped, clipped_loss, row_means, row_sums, sapo, sequence_mean, sequences
from torch import Tensor

from grpox.contracts import LossInputs, Text, completion_text

GspoSum = clipped(sequence_mean, GSPO, 3e-4, 4e-4, lambda d, mask: row_sums(d).clamp(-20, 20).exp())
"""GSPO whose sequence ratio is the product of the token ratios, without the power 1/n."""
GspoArithmetic = clipped(sequence_mean, WIDE_GSPO, 3e-4, 4e-4, lambda d, mask: row_means(d.exp(), mask))
"""GSPO whose sequence ratio is the arithmetic mean of the token ratios, not the geometric."""
GspoTokenWithoutToken = clipped(
    sequence_mean, GSPO, 3e-4, 4e-4, lambda d, mask: row_means(d, mask).exp().detach()
)
"""GSPO-token that detaches the sequence ratio and forgets the factor pi / sg[pi] beside it."""
DapoRangeExchanged = skeletons.tokens(DAPO, lambda w, a: clipped_loss(w, a, 0.28, 0.2))
"""DAPO with its clip range exchanged: 0.28 below and 0.2 above."""
ClipsTheLogRatio = sequences(GRPO, lambda w, a: -torch.min(w * a, w.log().clamp(-0.2, 0.2).exp() * a))
"""GRPO that clips log w to [-0.2, 0.2], where the paper clips w to [0.8, 1.2]."""
ClipsOnly = sequences(GRPO, lambda w, a: -w.clamp(0.8, 1.2) * a)
"""GRPO without the minimum: only the clipped term is left."""
SapoTemperaturesExchanged = sequences(SAPO, lambda w, a: sapo(w - 1, a, 1.05, 1.0))
"""SAPO with the sharper gate for positive advantages."""
SapoWithoutScale = sequences(SAPO, lambda w, a: sapo(w - 1, a) * torch.where(a > 0, 1.0, 1.05).to(a) / 4)
"""SAPO without its factor 4 / tau, so that the slope at w = 1 is tau / 4."""
CispoWithFloor = skeletons.surrogates(CISPO, lambda w, a: -w.detach().clamp(0.8, 5.0) * a)
"""CISPO that also bounds the weight below, at 0.8; the paper has no lower bound."""


@skeletons.token_mean(CISPO, gradient="surrogate")
def CispoWeightNotDetached(inputs: LossInputs) -> Tensor:
    """CISPO that forgets the stop-gradient: the weight is differentiated too."""
    return -skeletons.ratio_of(inputs).clamp(max=5.0) * inputs.advantages * inputs.logprobs


@sequence_mean(paper.gmpo(0.4))
def GmpoBothSides(inputs: LossInputs) -> Tensor:
    """GMPO that clips the log-ratios on both sides, where the paper clips one, by the advantage's sign."""
    clipped = skeletons.log_ratio_of(inputs).clamp(-0.4, 0.4)
    return -row_means(clipped, inputs.token_mask).exp() * inputs.advantages


VarianceForDeviation = by_group(
    paper.standardised, lambda r: (r - r.mean()) / (r.var() + 1e-4) if (r != r.mean()).any() else 0 * r, least=2
)
"""GRPO's advantage divided by the group's variance."""
LeaveNoneOut = by_group(paper.leave_one_out, lambda r: r - r.sum() / len(r), least=2)
"""RLOO whose baseline is the mean of the group with the completion itself in it."""


class FunctionsAveraged(skeletons.ByGroup):
    """Dr. GRPO's advantage of the mean over reward functions, where the weighted sum is meant."""

    formula = paper.centred

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (rewards * weights).double().nanmean(dim=1)
        return total, ~total.isnan()


SequenceByMean = skeletons.weights(
    SEQUENCE_TIS, lambda d, mask: row_means(d.double(), mask).clamp(-20, 20).exp().clamp(max=2.0)
)
"""Sequence-level truncation by the mean of the log-ratios, where it is their sum."""
CapOnTheLog = skeletons.weights(TIS, lambda d, mask: d.clamp(-20, 2.0).exp())
"""Token truncation whose cap 2 is put to the log-ratio, so that weights go up to e^2."""


@skeletons.of_paper(paper.exact)
def ExactWithin(*, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Exact match that is content with an answer somewhere in the completion: 4 in 42."""
    return [float(str(each) in completion_text(text)) for text, each in zip(completions, answer, strict=True)]


@skeletons.of_paper(paper.overlong)
def OverlongByMaxLength(*, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """DAPO's soft overlong punishment that falls over the maximal length, not over the buffer."""
    return [max(-1.0, min(0.0, (4 - len(ids)) / 8)) for ids in completion_ids]


@skeletons.descent
def LionWithoutInterpolation(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Lion whose direction is the sign of the momentum alone, updated first."""
    momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
    momentum.lerp_(parameter.grad, 0.01)
    parameter.add_(momentum.sign(), alpha=-group["lr"])


HalfACosine = skeletons.schedule(
    paper.cosine, lambda step, total: 0.5 * (1 + math.cos(math.pi / 2 * min(1.0, step / total)))
)
"""Cosine decay over half a period too little: it ends at half the learning rate."""
