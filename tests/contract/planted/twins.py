"""Correct components, many of them the twin of a planted one: all checks pass on each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import references as paper
import skeletons
import torch
from references import CISPO, DAPO, GRADIENT, GRPO, GSPO, ICEPOP, PREFIX, SAPO, SEQUENCE_TIS, TIS
from skeletons import Saved, clipped, clipped_loss, row_means, sequence_mean, sequences, token_mean, tokens
from torch import Tensor

from grpox import hookimpl
from grpox.contracts import LossInputs, LossOutput, Reduction, StepContext, Text, completion_text

Grpo = sequences(GRPO, lambda w, a: clipped_loss(w, a, 0.2, 0.2))
"""GRPO's clipped surrogate."""
Dapo = tokens(DAPO, lambda w, a: clipped_loss(w, a, 0.2, 0.28))
"""DAPO's clipped surrogate."""
Gspo = clipped(sequence_mean, GSPO, 3e-4, 4e-4, lambda d, mask: row_means(d, mask).exp())
"""GSPO."""
Sapo = sequences(SAPO, lambda w, a: skeletons.sapo(w - 1, a))
"""SAPO."""
Cispo = skeletons.surrogates(CISPO, lambda w, a: -w.detach().clamp(max=5.0) * a)
"""CISPO."""
PolicyGradient = tokens(GRADIENT, lambda w, a: -w * a)
"""Policy gradient with importance weights, unclipped."""
PrefixRatio = clipped(token_mean, PREFIX, 0.2, 0.2, lambda d, mask: d.cumsum(dim=1).clamp(-20, 20).exp())
"""Clipped surrogate of the product of the ratios up to each token."""


class GspoToken:
    """GSPO-token: sg[s_i] pi / sg[pi] of each token, which has GSPO's value."""

    reduction = Reduction.SEQUENCE_MEAN
    gradient = "surrogate"
    zero_at_zero_advantage = True
    formula = paper.gspo_token_gradient(0.2, 0.2)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = self._ratio(inputs) * (inputs.logprobs - inputs.logprobs.detach()).exp()
        return LossOutput(clipped_loss(ratio, inputs.advantages, 0.2, 0.2))

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        ratio, advantages = self._ratio(inputs), inputs.advantages
        is_clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
        return torch.where(is_clipped, 0.0, -ratio * advantages)

    def _ratio(self, inputs: LossInputs) -> Tensor:
        ratio = row_means(skeletons.log_ratio_of(inputs), inputs.token_mask).exp().detach()
        return ratio.expand_as(inputs.logprobs)


@sequence_mean(paper.gmpo(0.4))
def Gmpo(inputs: LossInputs) -> Tensor:
    """GMPO."""
    log_ratio, advantages = skeletons.log_ratio_of(inputs), inputs.advantages
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=0.4), log_ratio.clamp(min=-0.4))
    return -row_means(clipped, inputs.token_mask).exp() * advantages


class TwoSided(skeletons.Loss):
    """GRPO whose unclipped branch ends at 4 (INTELLECT-2)."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = skeletons.ratio_of(inputs), inputs.advantages
        bounded = torch.min(ratio.clamp(max=4.0) * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return LossOutput(-bounded, {"bounded": (ratio > 4.0).to(ratio.dtype)})


@token_mean()
def FadingPositions(inputs: LossInputs) -> Tensor:
    """DAPO whose tokens fade by their position among the tokens of the mask."""
    position = inputs.token_mask.cumsum(dim=1).to(inputs.logprobs.dtype)
    return clipped_loss(skeletons.ratio_of(inputs), inputs.advantages, 0.2, 0.28) * 0.99**position


class AdaptiveClip(Saved, skeletons.AdaptiveClip):
    """GRPO whose clip range follows the KL between pi_old and pi, and is part of checkpoints."""

    formula = GRPO
    saved = ("width", "steps")


class ByStep(Saved, skeletons.Loss):
    """GRPO whose clip range narrows with the optimizer steps."""

    saved = ("width",)
    width = 0.3

    def begin_step(self, context: StepContext) -> None:
        self.width = 0.3 - 0.1 * context.step / context.total_steps


@skeletons.token_loss(paper.with_entropy, needs=("entropy_gradient",))
def EntropyBonus(inputs: LossInputs) -> Tensor:
    """Policy gradient with an entropy bonus of its own."""
    return skeletons.gradient_loss(inputs) - 0.01 * inputs.entropy


@skeletons.token_loss(paper.with_reference, needs=("reference_logprobs",))
def ReferencePenalty(inputs: LossInputs) -> Tensor:
    """Policy gradient with a KL penalty k3 of its own."""
    return skeletons.gradient_loss(inputs) + 0.04 * skeletons.k3(inputs.reference_logprobs - inputs.logprobs)


class Centred(skeletons.ByGroup):
    """Dr. GRPO's advantage."""

    formula = paper.centred
    least = 2

    def differ(self, values: Tensor) -> bool:
        # What differs in the last digits of float32 is rounding.
        return bool(values.max() - values.min() > 1e-6 * values.abs().max())


class LeaveOneOut(Centred):
    """RLOO's advantage."""

    formula = paper.leave_one_out

    def advantages(self, values: Tensor) -> Tensor:
        return values - (values.sum() - values) / (len(values) - 1)


class Standardised(Centred):
    """GRPO's advantage."""

    formula = paper.standardised

    def advantages(self, values: Tensor) -> Tensor:
        return (values - values.mean()) / (values.std() + 1e-4)


class Ranked(Centred):
    """Rank in the group, ties in their middle."""

    formula = paper.ranked

    def advantages(self, values: Tensor) -> Tensor:
        return torch.sign(values[:, None] - values[None, :]).sum(dim=1) / len(values)


class RunningStd(Saved):
    """Dr. GRPO's advantage over a running root mean square, which is part of checkpoints."""

    saved = ("square",)

    def __init__(self) -> None:
        self.square = 1.0

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        centred = Centred().scale(rewards, weights, group_ids).double()
        _, scored = skeletons.totals(rewards, weights)
        if bool(centred.any()):
            self.square = 0.9 * self.square + 0.1 * float(centred[scored].square().mean())
        return (centred / (self.square**0.5 + 1e-4)).float()


Truncate = skeletons.weights(TIS, lambda d, mask: d.double().clamp(max=20).exp().clamp(max=2.0))
"""Truncated importance sampling."""
TruncateSequence = skeletons.weights(
    SEQUENCE_TIS,
    lambda d, mask: skeletons.row_sums(d.double().clamp(-1e4, 1e4)).clamp(max=20).exp().clamp(max=2.0),
)
"""Sequence-level truncation."""


@skeletons.correction(ICEPOP)
def Icepop(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """IcePop."""
    ratio = torch.where(mask, old.double() - sampler.double(), 0.0).clamp(max=20).exp()
    keep = (ratio >= 0.5) & (ratio <= 5.0)
    return torch.where(keep, ratio, 0.0).to(old.dtype), keep


class CapByStep(skeletons.CappedWeights):
    """Token truncation whose cap falls with the optimizer steps."""

    stateless = True  # the cap follows from the step

    def begin_step(self, context: StepContext) -> None:
        self.cap = max(1.0, 4.0 - 0.1 * context.step)


@skeletons.of_paper(paper.exact)
def Exact(*, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """Exact match."""
    pairs = zip(completions, answer, strict=True)
    return [
        None if right is None else float(completion_text(text).strip() == str(right)) for text, right in pairs
    ]


@skeletons.of_paper(paper.overlong)
def Overlong(*, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """DAPO's soft overlong punishment, of a longest length of 8 and a buffer of 4."""
    return [max(-1.0, min(0.0, (4 - len(ids)) / 4)) for ids in completion_ids]


class JudgeInThreads:
    """Judge with threads that returns the scores as the completions stand."""

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self._judge, map(completion_text, completions)))

    def _judge(self, text: str) -> float:
        return min(1.0, len(text) / 10)


async def awaited(completions: Sequence[Text], **columns: Any) -> list[float]:
    """Reward that is awaited."""
    return [float(completion_text(text).strip().isdigit()) for text in completions]


class History:
    """Observer with the history of its run, by the steps that it is given."""

    @hookimpl
    def grpox_run_started(self, run: Any) -> None:
        self.steps: dict[int, float] = {}

    @hookimpl
    def grpox_step_finished(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.steps[step] = metrics.get("reward", math.nan)
        (run.output_dir / f"step-{step}.txt").write_text(f"{self.steps[step]}", encoding="utf-8")


@skeletons.descent
def Lion(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Lion (arXiv 2302.06675) without weight decay."""
    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
    parameter.add_(momentum.lerp(parameter.grad, 0.1).sign(), alpha=-group["lr"])
    momentum.lerp_(parameter.grad, 0.01)


Cosine = skeletons.schedule(
    paper.cosine, lambda step, total: 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
)
"""Cosine decay to 0."""


class Doubles:
    """Dataset of sums of equal numbers."""

    def load(self) -> datasets.Dataset:
        return datasets.Dataset.from_list(skeletons.SUMS).shuffle(seed=1)
