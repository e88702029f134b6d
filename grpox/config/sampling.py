"""The sections `sampling` and `evaluation`, and the sampling settings of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from grpox.config.component import RewardRef, Section

PREFIX = "evaluation/"
"""Prefix of an evaluation's metrics among those of steps."""


class SamplingConfig(Section):
    max_completion_length: int = Field(256, ge=1)
    """Tokens a completion may have at most, EOS included. TRL 1.16 has 512."""
    min_completion_length: int = Field(0, ge=0)
    """Tokens before which a completion cannot end by EOS."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits in generation and in training alike; 1 samples from the policy itself."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (arXiv 1904.09751); 1 keeps every token, as GRPO assumes."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely relative to the likeliest (arXiv 2407.01082); 0 keeps all."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the logits of tokens that have occurred (CTRL, arXiv 1909.05858); 1 does nothing."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion; they stay part of it."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a completion, besides the EOS tokens of model and tokenizer."""
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator's library as it is: transformers' GenerationConfig for hf."""

    @model_validator(mode="after")
    def _can_end(self) -> Self:
        low, high = self.min_completion_length, self.max_completion_length
        if low > high:
            raise ValueError(f"min_completion_length {low} is more than max_completion_length {high}")
        if "" in self.stop:
            raise ValueError("a text in stop is empty: every completion would end at once")
        return self


class EarlyStopConfig(Section):
    """When a run ends because its evaluations show no more gain; the names are those of common callbacks."""

    metric: str
    """Metric of the evaluations: ``accuracy``, ``pass_at_4``, ``rewards/exact/mean``."""
    patience: int = Field(1, ge=1)
    """Evaluations in a row without a gain that end the run."""
    min_delta: float = Field(0.0, ge=0)
    """A gain is more than this better than the best value so far."""
    mode: Literal["max", "min"] = "max"
    """Direction of the metric: larger values are better, or smaller ones."""


class EvaluationSamplingConfig(Section):
    """Keys of `sampling` that evaluations have otherwise; null: as `sampling` has them."""

    max_completion_length: int | None = Field(None, ge=1)
    """Tokens a completion may have at most, EOS included."""
    min_completion_length: int | None = Field(None, ge=0)
    """Tokens before which a completion cannot end by EOS."""
    temperature: float | None = Field(None, ge=0)
    """Divides the logits; 0 decodes greedily; null: `evaluation.temperature`."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; 1 keeps every token."""
    top_k: int | None = Field(None, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    repetition_penalty: float | None = Field(None, gt=0)
    """Divides the logits of tokens that have occurred; 1 does nothing."""
    stop: list[str] | None = None
    """Texts that end a completion, in place of the run's."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion besides EOS, in place of the run's."""
    generation_kwargs: dict[str, Any] | None = None
    """Passed to the generator's library, in place of the run's."""


class EvaluationConfig(Section):
    path: str
    """Held-out prompts, in a file of the same form as the training data."""
    every: int = Field(0, ge=0)
    """Optimizer steps between evaluations; 0: only before and after training."""
    accuracy: str | None = None
    """Reward whose mean is reported as the accuracy; default: the first one."""
    temperature: float = Field(0.0, ge=0)
    """0 decodes greedily."""
    batch_size: int = Field(256, ge=1)
    """Prompts generated together on each rank."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Keys of `sampling` that evaluations have otherwise."""
    rewards: list[RewardRef] | None = Field(None, min_length=1)
    """Reward functions of evaluations; default: those of the run."""
    num_generations: int = Field(1, ge=1)
    """Completions sampled for each prompt; TRL's num_generations_eval."""
    pass_at_k: list[int] = Field(default_factory=list)
    """Report the chance that at least one of k completions is right (arXiv 2107.03374), for each k listed."""
    right_at: float = 1.0
    """A completion is right, for pass_at_k, whose score by the reward `accuracy` is at least this."""
    early_stop: EarlyStopConfig | None = None
    """End the run when its evaluations show no more gain; default: never."""


def sampling_of(evaluation: EvaluationConfig, sampling: SamplingConfig) -> SamplingConfig:
    """Merge the evaluation's own keys into `sampling`, unchecked: a temperature of 0 is greedy here."""
    own = {name: value for name, value in evaluation.sampling if value is not None}
    return sampling.model_copy(update={"temperature": evaluation.temperature, **own})


def bare_name(metric: str) -> str:
    """Remove the prefix from the name of an evaluation's metric."""
    return metric.removeprefix(PREFIX)


def evaluation_in(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the evaluation's metrics among those of a step, without their prefix."""
    return {bare_name(name): value for name, value in metrics.items() if name.startswith(PREFIX)}
