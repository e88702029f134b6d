"""Components that keep something between calls which a checkpoint does not restore, or which calls change."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import references as paper
import skeletons
import torch
from skeletons import clipped_loss, ratio_of, totals
from torch import Tensor

from grpox import hookimpl
from grpox.contracts import LossInputs, LossOutput, Reduction, StepContext, Text, completion_text


class RunningBaseline:
    """Policy gradient whose running mean of advantages is updated by each micro-batch, and by no checkpoint."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    mean = 0.0

    def per_token(self, inputs: LossInputs) -> LossOutput:
        chosen = inputs.advantages[inputs.token_mask]
        if len(chosen):
            self.mean = 0.9 * self.mean + 0.1 * float(chosen.mean())
        return LossOutput(-ratio_of(inputs) * (inputs.advantages - self.mean))


class WarmsUpByCalls(skeletons.Saved, skeletons.Loss):
    """GRPO whose clip range widens with each call, so that more micro-batches widen it sooner."""

    saved = ("calls",)
    calls = 0

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.calls += 1
        self.width = min(0.2, 0.01 * self.calls)
        return super().per_token(inputs)


class ClipForgotten(skeletons.AdaptiveClip):
    """Adaptive clip range without state methods: a resumed run begins with 0.2 again."""


class StepsForgotten(skeletons.Saved, skeletons.AdaptiveClip):
    """Adaptive clip range whose checkpoint holds the range and not the number of steps it has averaged."""

    saved = ("width",)


class RestoresDefaults(skeletons.Saved, skeletons.AdaptiveClip):
    """Adaptive clip range that restores by .get with a misspelt key, and so the default."""

    saved = ("width", "steps")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.width = state.get("clip_width", 0.2)
        self.steps = state.get("steps", 0)


class RememberedMask(skeletons.Loss):
    """DAPO that computes its mask once per shape of a batch and reuses it, though masks differ."""

    stateless = True
    formula = paper.DAPO

    def __init__(self) -> None:
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def per_token(self, inputs: LossInputs) -> LossOutput:
        mask = self._masks.setdefault(tuple(inputs.token_mask.shape), inputs.token_mask.clone())
        return LossOutput(clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28) * mask)


class RunningStdForgotten(skeletons.ByGroup):
    """REINFORCE++ by a running standard deviation of rewards, which no checkpoint holds."""

    square = 0.0

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        result = super().scale(rewards, weights, group_ids)
        self.square = 0.9 * self.square + 0.1 * float(result.square().mean())
        return result / (self.square**0.5 + 1e-4)


class FirstBatchMeans:
    """Baseline of a prompt remembered by the number of its group, which the next batch gives to another."""

    formula = paper.centred

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, scored = totals(rewards, weights)
        result = torch.zeros_like(total)
        for group in group_ids.unique().tolist():
            rows = (group_ids == group) & scored
            if rows.any():
                result[rows] = total[rows] - self._means.setdefault(group, float(total[rows].mean()))
        return result.float()


class StateOfObjects(skeletons.Saved, skeletons.ByGroup):
    """Running maximum of rewards whose state is an object of its own, which a checkpoint cannot hold."""

    saved = ("seen",)

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, scored = totals(rewards, weights)
        self.seen.update(total[scored].tolist())
        return super().scale(rewards, weights, group_ids) / max(1.0, *map(abs, self.seen), 1.0)


class CapByOwnSteps(skeletons.CappedWeights):
    """Token truncation whose cap falls with the steps that it has counted itself, from 0 after a resume."""

    def begin_step(self, context: StepContext) -> None:
        self.cap = max(1.0, self.cap - 0.1)


class CapByCalls(skeletons.CappedWeights):
    """Token truncation whose cap falls with each micro-batch."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        self.cap = max(1.0, self.cap - 0.5)
        return super().correct(old, sampler, mask)


class Novelty:
    """Reward for completions never seen before, remembered on the object, of one rank and one process."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        scores = []
        for text in map(completion_text, completions):
            scores.append(float(text not in self._seen))
            self._seen.add(text)
        return scores


class TextsOnTheObject:
    """Length reward that leaves its texts on the object between two loops, where another call changes them."""

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        self._texts = [completion_text(text) for text in completions]
        time.sleep(0.1)  # a judge takes its time
        return [-len(text) / 100 for text in self._texts]


class SharedHistory:
    """Observer whose list of steps is the class's, and so of all runs of the process."""

    steps: ClassVar[list[int]] = []

    @hookimpl
    def grpox_step_finished(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        if self.steps and step <= self.steps[-1]:
            raise RuntimeError(f"step {step} came after step {self.steps[-1]}")
        self.steps.append(step)


class CountsSteps:
    """Observer that writes one file a step by its own count, which begins at 0 in a resumed run."""

    _count = 0

    @hookimpl
    def grpox_step_finished(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        self._count += 1
        (run.output_dir / f"step-{self._count}.txt").write_text(f"{metrics.get('reward')}", encoding="utf-8")


class MomentaElsewhere(skeletons.Descent):
    """Lion whose momenta are in a dict of its own, not in the optimizer's state, which checkpoints save."""

    def __init__(self) -> None:
        self._momenta: dict[Any, Tensor] = {}

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        momentum = self._momenta.setdefault(parameter, torch.zeros_like(parameter))
        parameter.add_(momentum.lerp(parameter.grad, 0.1).sign(), alpha=-group["lr"])
        momentum.lerp_(parameter.grad, 0.01)


class CountsInAClosure:
    """Schedule that counts its own calls, and so begins again in a resumed run."""

    formula = paper.linear

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        calls = [0]

        def factor(step: int) -> float:
            calls[0] += 1
            return max(0.0, 1 - (calls[0] - 1) / total_steps)

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
