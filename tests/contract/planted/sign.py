"""Components with the opposite sign somewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import references as paper
import skeletons
import torch
from references import CISPO, DAPO, GRPO, ICEPOP, SAPO, TIS
from skeletons import by_group, clipped_loss, gradient_loss, k3, sapo, sequences, surrogates, tokens
from torch import Tensor

from grpox.contracts import LossInputs

LargerBranch = sequences(GRPO, lambda w, a: -torch.max(w * a, w.clamp(0.8, 1.2) * a))
"""GRPO that takes the larger of the clipped and the unclipped term, where the paper takes the smaller."""
ObjectiveNotNegated = sequences(GRPO, lambda w, a: -clipped_loss(w, a, 0.2, 0.2))
"""GRPO's objective as the paper writes it, to be maximised, returned as a loss."""
InverseRatio = tokens(DAPO, lambda w, a: clipped_loss(1 / w, a, 0.2, 0.28))
"""DAPO with pi_old / pi in place of pi / pi_old."""
CispoNotNegated = surrogates(CISPO, lambda w, a: w.detach().clamp(max=5.0) * a)
"""CISPO without the minus, in the value and in what it expects of its gradient."""
SapoGateReversed = sequences(SAPO, lambda w, a: sapo(1 - w, a))
"""SAPO whose gate opens as the ratio falls: sigmoid(tau (1 - w))."""
AbsoluteAdvantage = tokens(paper.capped(5.0), lambda w, a: -w.clamp(max=5.0) * a.abs())
"""REINFORCE with clipping that weighs by the size of the advantage, so that bad tokens are learnt too."""


@skeletons.token_loss(paper.with_entropy, needs=("entropy_gradient",))
def EntropyPunished(inputs: LossInputs) -> Tensor:
    """Policy gradient whose entropy bonus is added to the loss, which lowers the entropy."""
    return gradient_loss(inputs) + 0.01 * inputs.entropy


@skeletons.token_loss(paper.with_reference, needs=("reference_logprobs",))
def ReferenceDistanceNegated(inputs: LossInputs) -> Tensor:
    """Policy gradient with a KL penalty k3 whose log-ratio to the reference is the wrong way round."""
    return gradient_loss(inputs) + 0.04 * k3(inputs.logprobs - inputs.reference_logprobs)


MeanMinusReward = by_group(paper.centred, lambda rewards: rewards.mean() - rewards)
"""Dr. GRPO's advantage with the terms exchanged: mean - r."""
LeaveOneOutReversed = by_group(paper.leave_one_out, lambda r: (r.sum() - r) / (len(r) - 1) - r, least=2)
"""RLOO that subtracts a completion's own reward from its baseline."""
BestRankedLowest = by_group(paper.ranked, lambda r: torch.sign(r[None, :] - r[:, None]).sum(dim=1) / len(r))
"""Advantages by rank in the group that sort downwards: the best completion gets the lowest rank."""
TruncateInverted = skeletons.weights(TIS, lambda d, mask: (-d).clamp(-20, 20).exp().clamp(max=2.0))
"""Truncated importance sampling with mu / pi_old in place of pi_old / mu."""


@skeletons.correction(ICEPOP)
def IcepopBandInverted(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """IcePop whose band [0.5, 5] is put to mu / pi_old, while kept tokens weigh pi_old / mu."""
    difference = torch.where(mask, old - sampler, 0.0).clamp(-20, 20)
    inverse = (-difference).exp()
    keep = (inverse >= 0.5) & (inverse <= 5.0)
    return torch.where(keep, difference.exp(), 0.0), keep


@skeletons.of_paper(paper.overlong)
def OverlongRewarded(*, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """DAPO's soft overlong punishment without its minus."""
    return [min(1.0, max(0.0, (len(ids) - 4) / 4)) for ids in completion_ids]


@skeletons.descent
def SignAscent(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Sign descent that adds the sign of the gradient."""
    parameter.add_(parameter.grad.sign(), alpha=group["lr"])


RisingCosine = skeletons.schedule(
    paper.cosine, lambda step, total: 0.5 * (1 - math.cos(math.pi * min(1.0, step / total)))
)
"""Cosine decay with the sign of the cosine lost: the learning rate begins at 0 and rises."""
