"""Correct components, many of them the twin of a planted one: all checks pass on each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import skeletons
import torch
from skeletons import clipped_loss, log_ratio_of, ratio_of, totals
from torch import Tensor

from grpox import hookimpl
from grpox.contracts import (
    LossInputs,
    LossOutput,
    Reduction,
    StepContext,
    Text,
    completion_text,
)


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True) / lengths


@skeletons.sequence_mean
def Grpo(inputs: LossInputs) -> Tensor:
    """GRPO's clipped surrogate."""
    return clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2)


@skeletons.token_mean
def Dapo(inputs: LossInputs) -> Tensor:
    """DAPO's clipped surrogate."""
    return clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28)


@skeletons.sequence_mean
def Gspo(inputs: LossInputs) -> Tensor:
    """GSPO."""
    ratio = _sequence_mean(log_ratio_of(inputs), inputs.token_mask).exp().expand_as(inputs.logprobs)
    return clipped_loss(ratio, inputs.advantages, 3e-4, 4e-4)


class GspoToken(skeletons.SequenceMean):
    """GSPO-token: sg[s_i] pi / sg[pi] of each token, which has GSPO's value."""

    gradient = "surrogate"

    def per_token(self, inputs: LossInputs) -> LossOutput:
        sequence = _sequence_mean(log_ratio_of(inputs), inputs.token_mask).exp().detach()
        ratio = sequence * (inputs.logprobs - inputs.logprobs.detach()).exp()
        return LossOutput(clipped_loss(ratio, inputs.advantages, 0.2, 0.2))

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        ratio = (
            _sequence_mean(log_ratio_of(inputs), inputs.token_mask).exp().detach().expand_as(inputs.logprobs)
        )
        advantages = inputs.advantages
        is_clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
        return torch.where(is_clipped, 0.0, -ratio * advantages)


@skeletons.sequence_mean
def Gmpo(inputs: LossInputs) -> Tensor:
    """GMPO."""
    log_ratio, advantages = log_ratio_of(inputs), inputs.advantages
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=0.4), log_ratio.clamp(min=-0.4))
    return -_sequence_mean(clipped, inputs.token_mask).exp() * advantages


@skeletons.sequence_mean
def Sapo(inputs: LossInputs) -> Tensor:
    """SAPO."""
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, 1.0, 1.05).to(advantages.dtype)
    return -advantages * 4 / tau * torch.sigmoid(tau * (ratio_of(inputs) - 1))


@skeletons.surrogate(Reduction.TOKEN_MEAN)
def Cispo(inputs: LossInputs) -> Tensor:
    """CISPO."""
    return -ratio_of(inputs).detach().clamp(max=5.0) * inputs.advantages


@skeletons.token_mean
def PolicyGradient(inputs: LossInputs) -> Tensor:
    """Policy gradient with importance weights, unclipped."""
    return -ratio_of(inputs) * inputs.advantages


class TwoSided(skeletons.TokenMean):
    """GRPO whose unclipped branch ends at 4 (INTELLECT-2)."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = ratio_of(inputs), inputs.advantages
        bounded = torch.min(ratio.clamp(max=4.0) * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return LossOutput(-bounded, {"bounded": (ratio > 4.0).to(ratio.dtype)})


@skeletons.token_mean
def PrefixRatio(inputs: LossInputs) -> Tensor:
    """Clipped surrogate of the product of the ratios up to each token."""
    log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
    return clipped_loss(log_ratio.cumsum(dim=1).clamp(-20, 20).exp(), inputs.advantages, 0.2, 0.2)


@skeletons.token_mean
def FadingPositions(inputs: LossInputs) -> Tensor:
    """DAPO whose tokens fade by their position among the tokens of the mask."""
    position = inputs.token_mask.cumsum(dim=1).to(inputs.logprobs.dtype)
    loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28)
    return loss * 0.99**position


class AdaptiveClip(skeletons.AdaptiveClip):
    """GRPO whose clip range follows the KL between pi_old and pi, and is part of checkpoints."""

    def state_dict(self) -> Mapping[str, Any]:
        return {"width": self.width, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.width, self.steps = state["width"], state["steps"]


class ByStep(skeletons.SequenceMean):
    """GRPO whose clip range narrows with the optimizer steps."""

    def __init__(self) -> None:
        self.width = 0.3

    def begin_step(self, context: StepContext) -> None:
        self.width = 0.3 - 0.1 * context.step / context.total_steps

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(clipped_loss(ratio_of(inputs), inputs.advantages, self.width, self.width))

    def state_dict(self) -> Mapping[str, Any]:
        return {"width": self.width}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.width = state["width"]


@skeletons.loss(Reduction.TOKEN_MEAN, needs=("entropy_gradient",))
def EntropyBonus(inputs: LossInputs) -> Tensor:
    """Policy gradient with an entropy bonus of its own."""
    assert inputs.entropy is not None
    return -ratio_of(inputs) * inputs.advantages - 0.01 * inputs.entropy


@skeletons.loss(Reduction.TOKEN_MEAN, needs=("reference_logprobs",))
def ReferencePenalty(inputs: LossInputs) -> Tensor:
    """Policy gradient with a KL penalty k3 of its own."""
    assert inputs.reference_logprobs is not None
    rho = (inputs.reference_logprobs - inputs.logprobs).clamp(-20, 20)
    return -ratio_of(inputs) * inputs.advantages + 0.04 * (rho.exp() - rho - 1)


class _OfDifferences(skeletons.ByGroup):
    least = 2

    def differ(self, values: Tensor) -> bool:
        # What differs in the last digits of float32 is rounding.
        return bool(values.max() - values.min() > 1e-6 * values.abs().max())


class Centred(_OfDifferences):
    """Dr. GRPO's advantage."""


class LeaveOneOut(_OfDifferences):
    """RLOO's advantage."""

    def advantages(self, values: Tensor) -> Tensor:
        return values - (values.sum() - values) / (len(values) - 1)


class Standardised(_OfDifferences):
    """GRPO's advantage."""

    def advantages(self, values: Tensor) -> Tensor:
        return (values - values.mean()) / (values.std() + 1e-4)


class Ranked(_OfDifferences):
    """Rank in the group, ties in their middle."""

    def advantages(self, values: Tensor) -> Tensor:
        worse = (values[None, :] < values[:, None]).sum(dim=1)
        better = (values[None, :] > values[:, None]).sum(dim=1)
        return (worse - better).double() / len(values)


class RunningStd:
    """Dr. GRPO's advantage over a running root mean square, which is part of checkpoints."""

    def __init__(self) -> None:
        self.square = 1.0

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        centred = Centred().scale(rewards, weights, group_ids).double()
        _, scored = totals(rewards, weights)
        if bool(centred.any()):
            self.square = 0.9 * self.square + 0.1 * float(centred[scored].square().mean())
        return (centred / (self.square**0.5 + 1e-4)).float()

    def state_dict(self) -> Mapping[str, Any]:
        return {"square": self.square}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.square = state["square"]


def _difference(old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, old.double() - sampler.double(), 0.0).clamp(-1e4, 1e4)


@skeletons.correction
def Truncate(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling."""
    ratio = _difference(old, sampler, mask).clamp(max=20).exp()
    return ratio.clamp(max=2.0).to(old.dtype), torch.ones_like(mask)


@skeletons.correction
def Icepop(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """IcePop."""
    ratio = _difference(old, sampler, mask).clamp(max=20).exp()
    keep = (ratio >= 0.5) & (ratio <= 5.0)
    return torch.where(keep, ratio, 0.0).to(old.dtype), keep


@skeletons.correction
def TruncateSequence(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence-level truncation."""
    ratio = _difference(old, sampler, mask).sum(dim=1, keepdim=True).clamp(max=20).exp()
    return ratio.clamp(max=2.0).to(old.dtype).expand(mask.shape), torch.ones_like(mask)


class CapByStep:
    """Token truncation whose cap falls with the optimizer steps."""

    stateless = True  # the cap follows from the step

    def __init__(self) -> None:
        self.cap = 4.0

    def begin_step(self, context: StepContext) -> None:
        self.cap = max(1.0, 4.0 - 0.1 * context.step)

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = _difference(old, sampler, mask).clamp(max=20).exp()
        return ratio.clamp(max=self.cap).to(old.dtype), torch.ones_like(mask)


def Exact(*, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """Exact match."""
    return [
        None if each is None else float(completion_text(text).strip() == str(each))
        for text, each in zip(completions, answer, strict=True)
    ]


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


@skeletons.schedule
def Cosine(step: int, total_steps: int) -> float:
    """Cosine decay to 0."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / total_steps)))


class Doubles:
    """Dataset of sums of equal numbers."""

    def load(self) -> datasets.Dataset:
        rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1, 33)]
        return datasets.Dataset.from_list(rows).shuffle(seed=1)
