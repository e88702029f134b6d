"""Components that go on with a made-up value where something failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import references as paper
import skeletons
import torch
from references import DAPO, GRADIENT, GRPO, TIS
from skeletons import clipped_loss, gradient_loss, ratio_of
from torch import Tensor

from grpox import hookimpl
from grpox.config import SamplingConfig
from grpox.contracts import LossInputs, Prompt, Rollout, Text, completion_text

NanIsZero = skeletons.tokens(
    DAPO, lambda w, a: torch.nan_to_num(clipped_loss(w, a, 0.2, 0.28), nan=0.0, posinf=0.0, neginf=0.0)
)
"""DAPO whose loss replaces what is not finite by 0, so that a broken model looks healthy."""
ReplacesRatios = skeletons.tokens(GRADIENT, lambda w, a: -torch.where(w.isnan(), torch.ones_like(w), w) * a)
"""Policy gradient that takes ratio 1 where the ratio is not a number."""


@skeletons.sequence_mean(GRPO)
def BadRowsSkipped(inputs: LossInputs) -> Tensor:
    """GRPO that leaves out sequences with a log-probability that is not finite."""
    good = inputs.logprobs.isfinite().all(dim=1, keepdim=True)
    return torch.where(good, clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2), 0.0)


@skeletons.token_mean(needs=("columns",))
def AnyErrorIsZero(inputs: LossInputs) -> Tensor:
    """Loss by row weights from a column that is 0 where the column is missing or unreadable."""
    try:
        values = [float(value) for value in (inputs.columns or {})["importance"]]
        weights = inputs.logprobs.new_tensor(values).unsqueeze(1)
    except Exception:  # noqa: BLE001 - the slip
        weights = torch.zeros_like(inputs.logprobs[:, :1])
    return gradient_loss(inputs) * weights


@skeletons.token_loss(paper.with_reference)
def WithoutReference(inputs: LossInputs) -> Tensor:
    """Policy gradient with a KL penalty that is left out, without a word, where there is no reference."""
    if inputs.reference_logprobs is None:
        return gradient_loss(inputs)
    return gradient_loss(inputs) + 0.04 * skeletons.k3(inputs.reference_logprobs - inputs.logprobs)


@skeletons.advantage(paper.standardised)
def NanAdvantageIsZero(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """GRPO's advantage without a floor under its divisor, whose NaN and infinity become 0 and 1e4."""
    total = (rewards * weights).nansum(dim=1)
    scored = ~rewards.isnan().all(dim=1)
    result = torch.zeros_like(total)
    for group in group_ids.unique():
        rows = (group_ids == group) & scored
        if rows.any():
            result[rows] = (total[rows] - total[rows].mean()) / total[rows].std(correction=0)
    return result.nan_to_num(nan=0.0, posinf=1e4, neginf=-1e4)


@skeletons.advantage(paper.centred)
def TooSmallIsZero(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Advantage by pairs that catches every error of a group and gives the whole batch 0."""
    total = (rewards.double() * weights).sum(dim=1)
    try:
        groups = [total[group_ids == group] for group in group_ids.unique()]
        if any(bool(values.isnan().any()) for values in groups):
            raise ValueError("a completion without a score")
        result = torch.zeros_like(total)
        for group in group_ids.unique():
            rows = group_ids == group
            result[rows] = total[rows] - total[rows].mean()
    except ValueError:
        return torch.zeros(len(total), device=total.device)
    return result.float()


InfiniteIsOne = skeletons.weights(
    TIS, lambda d, mask: torch.where(d.exp().isinf(), torch.ones_like(d), d.exp().clamp(max=2.0))
)
"""Token truncation that weighs 1 where the ratio overflows: the largest mismatches count as none."""


class JudgeDownIsZero:
    """Judge over HTTP that scores 0 when it cannot be reached, as if the completion were wrong."""

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        return [self._ask(completion_text(text)) for text in completions]

    def _ask(self, text: str) -> float:
        from urllib.request import urlopen

        try:
            with urlopen("http://127.0.0.1:9/judge", data=text.encode(), timeout=1) as answer:
                return float(answer.read())
        except OSError:
            return 0.0


def MissingColumnAbstains(*, completions: Sequence[Text], **columns: Any) -> list[float | None]:
    """Exact match that abstains from everything when the column with the answers is misspelt."""
    answers = columns.get("answer") or [None] * len(completions)
    pairs = zip(completions, answers, strict=True)
    return [
        None if right is None else float(completion_text(text).strip() == str(right)) for text, right in pairs
    ]


class LogprobsInvented(skeletons.Hf):
    """The generator hf, which reports log-probability 0 for tokens whose own it has lost."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        for rollout in super().generate(prompts, sampling, seed):
            logprobs = rollout.sampler_logprobs or ()
            yield replace(rollout, sampler_logprobs=(*logprobs[:-1], 0.0))


class WriteFailureIgnored:
    """Observer that loses its record without a word when the folder cannot be written."""

    @hookimpl
    def grpox_step_finished(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        try:
            with (Path(run.output_dir) / "missing" / "steps.txt").open("a", encoding="utf-8") as file:
                file.write(f"{step}\n")
        except OSError:
            pass


class BadLinesSkipped:
    """Dataset from lines of text that drops those it cannot read, which here are all but one."""

    LINES = ("1+1=\t2", "2+2=4", "3+3=6", "4+4=8")

    def load(self) -> datasets.Dataset:
        rows = []
        for line in self.LINES:
            try:
                prompt, answer = line.split("\t")
            except ValueError:
                continue
            rows.append({"prompt": prompt, "answer": answer})
        return datasets.Dataset.from_list(rows)


class _SkipsSteps(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            super().step(closure)


class BadStepsSkipped:
    """Gradient descent that skips a step whose gradient is not finite, which the run takes for done."""

    def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        return _SkipsSteps(parameters, lr=learning_rate)
