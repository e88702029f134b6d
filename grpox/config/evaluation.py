"""The section `evaluation`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grpox.config.component import RewardRef
from grpox.config.section import Section


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
