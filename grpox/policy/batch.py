"""Rollouts -> RolloutBatch: prompts padded on the left, completions on the right, as the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import Rollout


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and its completion, without padding."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True)
class RolloutBatch:
    """One micro-batch of B rollouts on one rank; P is its longest prompt, T its longest completion."""

    input_ids: Tensor  # i64[B, P + T]
    attention_mask: Tensor  # i64[B, P + T]
    token_mask: Tensor  # bool[B, T]: tokens of the completion that the model wrote
    sampler_logprobs: Tensor  # f32[B, T], NaN where the generator told none
    advantages: Tensor  # f32[B]
    known_sequences: Sequence[TokenSequence] | None = field(default=None, repr=False, compare=False)
    """What `sequences` are, where somebody knows: they need not be read out of the tensors then."""

    @property
    def sequences(self) -> Sequence[TokenSequence]:
        """The rows without their padding, B of them."""
        return self._read_sequences() if self.known_sequences is None else self.known_sequences

    @property
    def completion_ids(self) -> Tensor:
        """i64[B, T]"""
        return self.input_ids[:, -self.token_mask.shape[1] :]

    @property
    def position_ids(self) -> Tensor:
        """i64[B, P + T], counted from the first real token, so that left padding shifts nothing."""
        return (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)

    def _read_sequences(self) -> list[TokenSequence]:
        prompt_columns = self.input_ids.shape[1] - self.token_mask.shape[1]
        prompts = self.attention_mask[:, :prompt_columns].sum(dim=1).tolist()
        completions = self.attention_mask[:, prompt_columns:].sum(dim=1).tolist()
        return [
            TokenSequence(
                tuple(row[prompt_columns - prompt : prompt_columns]),
                tuple(row[prompt_columns : prompt_columns + completion]),
            )
            for row, prompt, completion in zip(self.input_ids.tolist(), prompts, completions, strict=True)
        ]


def collate(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    pad_token_id: int,
    device: torch.device,
    mask_truncated: bool = False,
) -> RolloutBatch:
    """Pad the rollouts of one micro-batch into tensors on `device`.

    Args:
        mask_truncated: leave completions that ran into the longest length out of the token mask. They still
            count as sequences, and their rewards in their groups' statistics.
    """
    prompts = np.array([len(rollout.prompt_ids) for rollout in rollouts])
    completions = np.array([len(rollout.completion_ids) for rollout in rollouts])
    before, after = int(prompts.max()), max(int(completions.max()), 1)
    column = np.arange(-before, after)  # 0 is where the completions begin
    attended = (column >= -prompts[:, None]) & (column < completions[:, None])
    ids = np.full(attended.shape, pad_token_id, dtype=np.int64)
    counted = attended[:, before:].copy()
    told = np.full(counted.shape, np.nan, dtype=np.float32)
    for row, rollout in enumerate(rollouts):
        length = len(rollout.completion_ids)
        ids[row, before - len(rollout.prompt_ids) : before + length] = (
            rollout.prompt_ids + rollout.completion_ids
        )
        if rollout.sampler_logprobs is not None:
            told[row, :length] = rollout.sampler_logprobs
        if rollout.model_mask is not None:
            counted[row, :length] = rollout.model_mask
        if mask_truncated and rollout.finish_reason == "length":
            counted[row] = False

    return RolloutBatch(
        input_ids=from_lists(ids, np.int64, device),
        attention_mask=from_lists(attended, np.int64, device),
        token_mask=from_lists(counted, np.bool_, device),
        sampler_logprobs=from_lists(told, np.float32, device),
        advantages=from_lists(advantages, np.float32, device),
        known_sequences=[
            TokenSequence(tuple(rollout.prompt_ids), tuple(rollout.completion_ids)) for rollout in rollouts
        ],
    )


def from_lists(values: Sequence[Any] | np.ndarray, dtype: type[np.generic], device: torch.device) -> Tensor:
    """A tensor of `values`, lists of one length in lists; NumPy makes it in a fifth of torch.tensor's time.

    An array of that type is not copied on a CPU.
    """
    return torch.from_numpy(np.asarray(values, dtype=dtype)).to(device)
