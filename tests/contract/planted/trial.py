"""Correct components as a researcher writes them from the documentation alone, with parameters and state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import references as paper
import skeletons
import torch
from pydantic import BaseModel, Field
from skeletons import Configured, Saved, clipped_loss, log_ratio_of, row_means, row_sums
from torch import Tensor

from grpox import hookimpl
from grpox.config import SamplingConfig
from grpox.contracts import (
    AdvantageInputs,
    Control,
    GeneratorContext,
    LossInputs,
    LossOutput,
    Prompt,
    Reduction,
    Rollout,
    StepContext,
    Text,
    Turn,
    completion_text,
)
from grpox.toolkit import weighted_sum


class QuantileClip(Saved, Configured):
    """Clipped surrogate whose bounds follow the quantiles of the ratios of the steps before."""

    saved = ("low", "high")
    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    statistics: ClassVar[Mapping[str, Any]] = {"ratio": "gather"}
    zero_at_zero_advantage = True

    class Config(BaseModel):
        share: float = Field(0.05, gt=0, lt=0.5)
        """Share of the ratios that is beyond each bound."""
        decay: float = Field(0.5, ge=0, lt=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.low, self.high = 0.8, 1.2

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = log_ratio_of(inputs).exp()
        loss = clipped_loss(ratio, inputs.advantages, 1 - self.low, self.high - 1)
        return LossOutput(loss, {"quantile/high": torch.full_like(loss, self.high)})

    def end_step(self, statistics: Mapping[str, Any]) -> None:
        ratios = statistics["ratio"].double()
        if not len(ratios) or not bool(ratios.isfinite().all()):
            return
        decay, share = self.config.decay, self.config.share
        self.low = decay * self.low + (1 - decay) * min(0.99, float(ratios.quantile(share)))
        self.high = decay * self.high + (1 - decay) * max(1.01, float(ratios.quantile(1 - share)))


class RewardWeighted(Configured):
    """Reward-weighted regression: likelihood of each completion, weighted by exp(r / temperature)."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    sign = "other"
    needs = ("rewards",)

    class Config(BaseModel):
        temperature: float = Field(1.0, gt=0)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        scored = ~inputs.rewards.isnan().all(dim=1)
        weights = (inputs.rewards.nansum(dim=1) / self.config.temperature).clamp(max=20).exp()
        return LossOutput(-torch.where(scored, weights, 0.0).unsqueeze(1).to(inputs.logprobs) * inputs.logprobs)


class PairsOfAGroup(Configured):
    """Pairwise preference in a group: -log sigmoid(s_i - s_j) for each completion j that is worse than i.

    s_i is the sum of the log-ratios of completion i; better and worse is by advantage.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    formula = paper.pairwise
    scope = "group"
    sign = "other"
    needs = ("group_ids",)

    class Config(BaseModel):
        beta: float = Field(0.1, gt=0)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        scores = row_sums(torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)).squeeze(1)  # f32[B]
        quality = row_means(inputs.advantages, inputs.token_mask).squeeze(1)  # f32[B]
        same = inputs.group_ids[:, None] == inputs.group_ids[None, :]
        better = same & (quality[:, None] > quality[None, :])  # bool[B, B]
        margins = self.config.beta * (scores[:, None] - scores[None, :])
        losses = torch.where(better, -torch.nn.functional.logsigmoid(margins), 0.0).sum(dim=1)
        return LossOutput(losses.unsqueeze(1).expand_as(inputs.logprobs))


def _groups(group_ids: Tensor) -> list[Tensor]:
    return [group_ids == group for group in group_ids.unique()]


def _less_baseline(total: Tensor, group_ids: Tensor, baseline: Callable[[Tensor], Tensor]) -> Tensor:
    """Subtract a baseline of each group from its scored totals; 0 for the others."""
    result = torch.zeros_like(total)
    for group in _groups(group_ids):
        rows = group & ~total.isnan()
        if rows.any():
            result[rows] = total[rows] - baseline(total[rows])
    return result


class RunningStd(Saved, Configured):
    """The reward less its group's mean, over a running standard deviation of these differences."""

    saved = ("square", "batches")

    class Config(BaseModel):
        decay: float = Field(0.9, ge=0, lt=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.square, self.batches = 0.0, 0

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        total = weighted_sum(inputs.rewards, inputs.weights)
        centred = _less_baseline(total, inputs.group_ids, Tensor.mean)
        scored = ~total.isnan()
        if scored.any():
            self.batches += 1
            mean = float(centred[scored].square().mean())
            self.square = self.config.decay * self.square + (1 - self.config.decay) * mean
        weight = 1 - self.config.decay**self.batches
        std = (self.square / weight) ** 0.5 if weight else 0.0
        return (centred / (std + 1e-4)).float()


class QuantileBaseline(Configured):
    """The reward less a quantile of its group."""

    class Config(BaseModel):
        quantile: float = Field(0.75, ge=0, le=1)

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        quantile = self.config.quantile
        total = weighted_sum(rewards, weights)
        return _less_baseline(total, group_ids, lambda values: values.quantile(quantile)).float()


class ByDifficulty(Configured):
    """The reward less its group's mean, times the difficulty that a column of the data has."""

    class Config(BaseModel):
        column: str = "difficulty"

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        total = weighted_sum(inputs.rewards, inputs.weights)
        factors = total.new_tensor([float(value) for value in inputs.columns[self.config.column]])
        return (_less_baseline(total, inputs.group_ids, Tensor.mean) * factors).float()


class RewardToGo:
    """The rewards of a token and of those after it, less their mean over the group's completions.

    Without rewards of tokens, the reward of the completion is that of its last token.
    """

    per = "token"

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:
        total = weighted_sum(inputs.rewards, inputs.weights)
        togo = [self._to_go(inputs, row, float(reward)) for row, reward in enumerate(total.nan_to_num())]
        result: list[Tensor] = [torch.zeros(0)] * len(total)
        for group in _groups(inputs.group_ids):
            rows = group.nonzero().flatten().tolist()
            scored = [row for row in rows if not total[row].isnan()]
            baseline = sum(float(total[row]) for row in scored) / max(1, len(scored))
            for row in rows:
                known = togo[row] - baseline if row in scored else torch.zeros_like(togo[row])
                result[row] = torch.where(inputs.model_masks[row], known, 0.0).float()
        return result

    def _to_go(self, inputs: AdvantageInputs, row: int, reward: float) -> Tensor:
        rewards = torch.zeros(len(inputs.model_masks[row]), dtype=torch.float64)
        if inputs.token_rewards:
            for of_function in inputs.token_rewards.values():
                rewards += of_function[row].double().nan_to_num().cpu()
        elif len(rewards):
            rewards[-1] = reward
        return rewards.flip(0).cumsum(0).flip(0).to(inputs.rewards.device)


class SequenceCap(Configured):
    """Sequence-level truncation whose cap falls from `first` to `last` over the run."""

    stateless = True  # the cap follows from the step

    class Config(BaseModel):
        first: float = Field(8.0, ge=1)
        last: float = Field(2.0, ge=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.cap = config.first

    def begin_step(self, context: StepContext) -> None:
        share = (context.step - 1) / max(1, context.total_steps - 1)
        self.cap = self.config.first + share * (self.config.last - self.config.first)

    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        total = torch.where(mask, (old - sampler).double().clamp(-1e4, 1e4), 0.0).sum(dim=1, keepdim=True)
        return total.exp().expand(mask.shape)

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.raw(old, sampler, mask).clamp(max=self.cap)
        return weights.to(old.dtype), torch.ones_like(mask)


class Digits:
    """Process reward: half a point for each part between separators that is a number."""

    per = "separator"
    separator = "+"

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[list[float]]:
        parts = (completion_text(text).split(self.separator) for text in completions)
        return [[0.5 * part.strip().isdigit() for part in each] for each in parts]


def close(completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Share of the digits that are right, from the last."""
    pairs = zip(completions, answer, strict=True)
    return [_share(completion_text(text).strip(), str(right)) for text, right in pairs]


def _share(text: str, right: str) -> float:
    same = sum(a == b for a, b in zip(reversed(text), reversed(right), strict=False))
    return same / max(len(text), len(right), 1)


class Patience(Saved, Configured):
    """Ends a run whose reward has not risen for some steps."""

    saved = ("best", "since")

    class Config(BaseModel):
        steps: int = Field(3, ge=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.best, self.since = float("-inf"), 0

    @hookimpl
    def grpox_step_finished(self, step: int, metrics: Mapping[str, float], control: Control) -> None:
        reward = metrics.get("reward", float("nan"))
        self.since += 1
        if reward > self.best:
            self.best, self.since = reward, 0
        if self.since >= self.config.steps:
            control.stop(f"no better reward for {self.since} steps")


class TargetKl(Configured):
    """Doubles or halves beta so that the KL to the reference stays near a target, as PPO's adaptive penalty."""

    class Config(BaseModel):
        target: float = Field(0.01, gt=0)

    @hookimpl
    def grpox_step_finished(self, metrics: Mapping[str, float], control: Control) -> None:
        distance, beta = metrics.get("kl", 0.0), control.hyperparameters.get("beta")
        if beta is None:  # the run has no reference
            return
        if distance > 1.5 * self.config.target:
            control.set("beta", 2 * beta)
        elif distance < self.config.target / 1.5:
            control.set("beta", beta / 2)


class AsksAgain(skeletons.Hf):
    """Two turns: the model answers, is asked to add 1 to it, and answers again."""

    def start(self, context: GeneratorContext) -> None:
        super().start(context)
        self._question = tuple(context.tokenizer("+1=", add_special_tokens=False)["input_ids"])

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        room = sampling.max_completion_length - len(self._question)
        if room < 2:  # no room for a second turn
            yield from super().generate(prompts, sampling, seed)
            return
        turn = sampling.model_copy(update={"max_completion_length": room // 2})
        first = list(super().generate(prompts, turn, seed))
        follow = [
            Prompt(place, (*each.prompt_ids, *each.completion_ids, *self._question), 1)
            for place, each in enumerate(first)
        ]
        for second in super().generate(follow, turn, seed + 1):
            yield self._joined(first[second.group_id], second)

    def _joined(self, first: Rollout, second: Rollout) -> Rollout:
        question, version = self._question, first.policy_version
        begin = len(first.completion_ids) + len(question)
        end = begin + len(second.completion_ids)
        return Rollout(
            group_id=first.group_id,
            sample=first.sample,
            prompt_ids=first.prompt_ids,
            completion_ids=(*first.completion_ids, *question, *second.completion_ids),
            finish_reason=second.finish_reason,
            policy_version=version,
            sampler_logprobs=(
                *(first.sampler_logprobs or ()),
                *[0.0] * len(question),
                *(second.sampler_logprobs or ()),
            ),
            model_mask=(*[True] * len(first.completion_ids), *[False] * len(question), *[True] * (end - begin)),
            turns=(
                Turn(0, len(first.completion_ids), first.finish_reason, version, reward=0.0),
                Turn(begin, end, second.finish_reason, version, reward=1.0 * (second.finish_reason == "stop")),
            ),
        )


class Restarts(Configured):
    """Cosine decay to 0 with restarts (arXiv 1608.03983), in periods of equal length."""

    class Config(BaseModel):
        periods: int = Field(2, ge=1)

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        period = max(1, math.ceil(total_steps / self.config.periods))
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * (step % period) / period))
        )
