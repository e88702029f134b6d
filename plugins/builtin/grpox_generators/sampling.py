"""The sampling distribution as logits processors, and a recorder of the sampled tokens' log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpox.config import SamplingConfig


def warpers(sampling: SamplingConfig) -> list[LogitsProcessor]:
    """Temperature, then top-k, top-p and min-p, each only where it does something."""
    processors: list[LogitsProcessor] = []
    if sampling.temperature not in (0.0, 1.0):
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors


class SampledLogprobs(LogitsProcessor):  # type: ignore[misc]
    """Records log-probabilities of sampled tokens; must be the last processor.

    A processor sees the logits before the token is drawn. So each call keeps them, and reads from those of
    the call before the token that was drawn since: one [B, V] tensor is alive, not one per position.

    Args:
        prompt_length: columns of the prompt in the sequences that generate returns.
    """

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self._logprobs: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._read(input_ids)
        self._last = scores
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """Log-probabilities f32[B, T] of the completions in sequences i64[B, prompt_length + T]."""
        self._read(sequences[:, : self.prompt_length + len(self._logprobs) + 1])
        return torch.stack(self._logprobs, dim=1)

    def _read(self, input_ids: Tensor) -> None:
        if self._last is None:
            return
        chosen = self._last.gather(-1, input_ids[:, -1:]).squeeze(-1)
        self._logprobs.append(chosen - torch.logsumexp(self._last, dim=-1))
        self._last = None
