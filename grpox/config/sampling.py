"""The sections `sampling` and `evaluation`, and the sampling settings of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from grpox.config.component import RewardRef, Section

PREFIX = "evaluation/"
"""Prefix of evaluation metrics among the metrics of steps."""


class SamplingConfig(Section):
    max_completion_length: int = Field(256, ge=1)
    """Longest completion in tokens, including EOS. TRL 1.16 has 512."""
    min_completion_length: int = Field(0, ge=0)
    """Number of tokens before which a completion cannot end with EOS."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits, in generation and in training; 1 samples from the policy itself."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (arXiv 1904.09751); 1 keeps every token, as GRPO assumes."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely relative to the likeliest (arXiv 2407.01082); 0 keeps all."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the logits of tokens that have occurred (CTRL, arXiv 1909.05858); 1 does nothing."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion; the completion includes them."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a completion, besides the EOS tokens of model and tokenizer."""
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments passed unchanged to the generator's library: transformers' GenerationConfig for hf."""

    @model_validator(mode="after")
    def _can_end(self) -> Self:
        low, high = self.min_completion_length, self.max_completion_length
        if low > high:
            raise ValueError(f"min_completion_length {low} is more than max_completion_length {high}")
        if "" in self.stop:
            raise ValueError("a text in stop is empty, so every completion would end at once")
        return self


class EarlyStopConfig(Section):
    """Early stopping when evaluations stop improving; the names follow common early-stopping callbacks."""

    metric: str
    """Metric of the evaluations: ``accuracy``, ``pass_at_4``, ``rewards/exact/mean``."""
    patience: int = Field(1, ge=1)
    """Number of consecutive evaluations without improvement after which the run ends."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest improvement over the best value so far that counts; it must be exceeded."""
    mode: Literal["max", "min"] = "max"
    """Better values of the metric: max for larger ones, min for smaller ones."""


class EvaluationSamplingConfig(Section):
    """Sampling settings that differ in evaluations; null: the value in `sampling`."""

    max_completion_length: int | None = Field(None, ge=1)
    """Longest completion in tokens, including EOS."""
    min_completion_length: int | None = Field(None, ge=0)
    """Number of tokens before which a completion cannot end with EOS."""
    temperature: float | None = Field(None, ge=0)
    """Divides the logits; 0: greedy decoding; null: `evaluation.temperature`."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; 1 keeps every token."""
    top_k: int | None = Field(None, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    repetition_penalty: float | None = Field(None, gt=0)
    """Divides the logits of tokens that have occurred; 1 does nothing."""
    stop: list[str] | None = None
    """Texts that end a completion, instead of `sampling.stop`."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion besides EOS, instead of `sampling.stop_token_ids`."""
    generation_kwargs: dict[str, Any] | None = None
    """Arguments for the generator's library, instead of `sampling.generation_kwargs`."""


class EvaluationSetConfig(Section):
    """One of several sets of held-out prompts."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, or the id of a dataset on the hub."""
    subset: str | None = None
    """Configuration of a hub dataset that has several configurations."""
    split: str = "train"
    """Split of a hub dataset, as `datasets` writes it: ``test``, ``test[:500]``."""
    streaming: bool = False
    """Read only the first `rows` rows, without downloading or indexing the others."""
    rows: int | None = Field(None, ge=1)
    """Number of rows to use, from the first; default: all. A stream needs it, because a stream may have no
    end."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.streaming and self.rows is None:
            raise ValueError("streaming needs rows: each evaluation completes every prompt of the set")
        return self


class EvaluationConfig(Section):
    path: str | None = None
    """Held-out prompts, in a file of the same form as the training data."""
    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Several sets of held-out prompts by name, instead of `path`. The metrics of a set begin with its name:
    ``evaluation/hard/accuracy``; those without a name are over the completions of all sets."""
    every: int = Field(0, ge=0)
    """Optimizer steps between evaluations; 0: only before and after training."""
    accuracy: str | None = None
    """Reward whose mean is reported as accuracy; default: the first reward, if it has ``binary: true`` or is of
    itself declared to give only 0 and 1; else no metric is called accuracy."""
    temperature: float = Field(0.0, ge=0)
    """Divides the logits; 0: greedy decoding."""
    batch_size: int = Field(256, ge=1)
    """Number of prompts generated together on each rank."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Sampling settings that differ in evaluations."""
    rewards: list[RewardRef] | None = Field(None, min_length=1)
    """Reward functions of evaluations; default: the run's `rewards`."""
    num_generations: int = Field(1, ge=1)
    """Number of completions sampled for each prompt; num_generations_eval in TRL."""
    pass_at_k: list[int] = Field(default_factory=list)
    """Values of k: for each, report the chance that at least one of k completions is right (pass@k, arXiv
    2107.03374)."""
    right_at: float = 1.0
    """Lowest score, by the reward `accuracy` or else the first, that counts as right for pass_at_k."""
    early_stop: EarlyStopConfig | None = None
    """End the run when evaluations stop improving; default: never."""
    _is_binary: bool = PrivateAttr(
        False
    )  # decided when a run is checked: scores of the first reward are 0 or 1

    @property
    def says_accuracy(self) -> bool:
        """True if the mean of a reward is called accuracy."""
        return self.accuracy is not None or self._is_binary

    @property
    def named_sets(self) -> dict[str, EvaluationSetConfig]:
        """Sets by name; the single one of `path` under an empty name."""
        return self.sets if self.path is None else {"": EvaluationSetConfig(path=self.path)}

    @property
    def set_paths(self) -> dict[str, str]:
        """Key of the run file -> path of each set."""
        return {path_key(name): each.path for name, each in self.named_sets.items()}


def path_key(name: str) -> str:
    """Return the key of the run file that holds the path of a set; of the single one for an empty name."""
    return f"evaluation.sets.{name}.path" if name else "evaluation.path"


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
