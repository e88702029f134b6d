"""Prompts of one batch, padded on the left to one length; and prompts cut into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpox.contracts import Prompt


@dataclass(frozen=True)
class PaddedPrompts:
    """B prompts; P is the longest's length, at least 2."""

    input_ids: Tensor  # i64[B, P]
    attention_mask: Tensor  # i64[B, P]
    repeats: Tensor  # i64[B]: completions of each

    @property
    def lengths(self) -> Tensor:
        """i64[B]: tokens of each prompt."""
        return self.attention_mask.sum(dim=1)

    @property
    def group_rows(self) -> Tensor:
        """i64[N]: the prompt of each completion."""
        return torch.arange(len(self.repeats), device=self.repeats.device).repeat_interleave(self.repeats)


def pad_prompts(prompts: Sequence[Prompt], pad_token_id: int, device: torch.device) -> PaddedPrompts:
    """Pad to the longest, and to 2 at least: then there always are columns to prefill before the last one, and
    ranks that generate in step run the same number of forwards."""
    length = max(2, *(len(prompt.token_ids) for prompt in prompts))
    input_ids = torch.full((len(prompts), length), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, length - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        attention_mask[row, length - len(prompt.token_ids) :] = 1
    repeats = torch.tensor([prompt.num_samples for prompt in prompts])
    return PaddedPrompts(input_ids.to(device), attention_mask.to(device), repeats.to(device))


def cut(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Cut into runs of at most `batch_size` completions, whole groups; a larger group is a run of its own."""
    batch: list[Prompt] = []
    size = 0
    for prompt in prompts:
        if batch and size + prompt.num_samples > batch_size:
            yield batch
            batch, size = [], 0
        batch.append(prompt)
        size += prompt.num_samples
    if batch:
        yield batch
