"""Rollouts -> RolloutBatch: prompts padded on the left, completions on the right, as the model reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import Rollout
from grpox.from_lists import from_lists


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
    ids, attended, counted, told = [], [], [], []
    for rollout in rollouts:  # whole rows as lists: a tensor for each piece would take most of the time
        length = len(rollout.completion_ids)
        before, after = prompt_length - len(rollout.prompt_ids), completion_length - length
        tokens = rollout.prompt_ids + rollout.completion_ids
        ids.append([*[pad_token_id] * before, *tokens, *[pad_token_id] * after])
        attended.append([0] * before + [1] * len(tokens) + [0] * after)
        masked = mask_truncated and rollout.finish_reason == "length"
        written = (False,) * length if masked else rollout.model_mask or (True,) * length
        counted.append([*written, *[False] * after])
        logprobs = rollout.sampler_logprobs
        told.append([*((math.nan,) * length if logprobs is None else logprobs), *[math.nan] * after])
    return RolloutBatch(
        input_ids=from_lists(ids, np.int64, device),
        attention_mask=from_lists(attended, np.int64, device),
        token_mask=from_lists(counted, np.bool_, device),
        sampler_logprobs=from_lists(told, np.float32, device),
        advantages=from_lists(advantages, np.float32, device),
    )
