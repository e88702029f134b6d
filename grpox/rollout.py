"""Rollouts -> RolloutBatch: prompts padded on the left, completions on the right, as the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpox.contracts import Rollout


@dataclass(frozen=True)
class RolloutBatch:
    """One micro-batch of B rollouts on one rank; P is its longest prompt, T its longest completion."""

    input_ids: Tensor  # i64[B, P + T]
    attention_mask: Tensor  # i64[B, P + T]
    token_mask: Tensor  # bool[B, T]: tokens of the completion that the model wrote
    sampler_logprobs: Tensor  # f32[B, T], NaN where the generator told none
    advantages: Tensor  # f32[B]

    @property
    def completion_ids(self) -> Tensor:
        """i64[B, T]"""
        return self.input_ids[:, -self.token_mask.shape[1] :]

    @property
    def position_ids(self) -> Tensor:
        """i64[B, P + T], counted from the first real token, so that left padding shifts nothing."""
        return (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)


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
    prompt_length = max(len(rollout.prompt_ids) for rollout in rollouts)
    completion_length = max(max(len(rollout.completion_ids) for rollout in rollouts), 1)
    size = (len(rollouts), prompt_length + completion_length)
    input_ids = torch.full(size, pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(size, dtype=torch.long)
    token_mask = torch.zeros(len(rollouts), completion_length, dtype=torch.bool)
    sampler_logprobs = torch.full((len(rollouts), completion_length), torch.nan)
    for row, rollout in enumerate(rollouts):
        length = len(rollout.completion_ids)
        begin, end = prompt_length - len(rollout.prompt_ids), prompt_length + length
        input_ids[row, begin:end] = torch.tensor(rollout.prompt_ids + rollout.completion_ids)
        attention_mask[row, begin:end] = 1
        if not (mask_truncated and rollout.finish_reason == "length"):
            token_mask[row, :length] = torch.tensor(rollout.model_mask or (True,) * length)
        if rollout.sampler_logprobs is not None:
            sampler_logprobs[row, :length] = torch.tensor(rollout.sampler_logprobs)
    return RolloutBatch(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        token_mask=token_mask.to(device),
        sampler_logprobs=sampler_logprobs.to(device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
    )
