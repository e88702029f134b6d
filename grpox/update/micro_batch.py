"""A micro-batch of the schedule on one rank, with the log-probabilities that are kept for later passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpox.policy.batch import RolloutBatch

KEPT = ("old_logprobs", "reference_logprobs", "policy_keep")
"""What a slice may hold besides its batch, in the order of its fields."""


@dataclass(eq=False)
class Slice:
    """This rank's rows of one micro-batch, with log-probabilities kept for the later passes over it."""

    batch: RolloutBatch
    old_logprobs: Tensor | None = None
    """f32[B, T] under the policy that began this generation batch's updates; None while no update was made."""
    reference_logprobs: Tensor | None = None
    """f32[B, T] under the reference; None while not needed."""
    policy_keep: Tensor | None = None
    """bool[B, T]: tokens that the policy loss of the step at hand is made of; None between steps, and where all
    are."""

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of prompts, P, and of completions, T."""
        completions = self.batch.token_mask.shape[1]
        return self.batch.input_ids.shape[1] - completions, completions


def merged(slices: Sequence[Slice]) -> Slice:
    """All rows of `slices` in one, which is as wide as the widest of them.

    Raises:
        ValueError: log-probabilities are kept for some of them only.
    """
    prompts, completions = (max(widths) for widths in zip(*(s.columns for s in slices), strict=True))

    def both(s: Slice, tensor: Tensor) -> Tensor:
        return pad(tensor, (prompts - s.columns[0], completions - s.columns[1]))

    def own(s: Slice, tensor: Tensor) -> Tensor:
        return pad(tensor, (0, completions - s.columns[1]))

    batch = RolloutBatch(
        input_ids=torch.cat([both(s, s.batch.input_ids) for s in slices]),
        attention_mask=torch.cat([both(s, s.batch.attention_mask) for s in slices]),
        token_mask=torch.cat([own(s, s.batch.token_mask) for s in slices]),
        sampler_logprobs=torch.cat([own(s, s.batch.sampler_logprobs) for s in slices]),
        advantages=torch.cat([s.batch.advantages for s in slices]),
        known_sequences=[sequence for s in slices for sequence in s.batch.sequences],
    )
    kept = []
    for name in KEPT:
        known = [(s, getattr(s, name)) for s in slices if getattr(s, name) is not None]
        if len(known) not in (0, len(slices)):
            raise ValueError(f"{name} is there for {len(known)} of {len(slices)} slices of one step")
        kept.append(torch.cat([own(s, tensor) for s, tensor in known]) if known else None)
    return Slice(batch, *kept)


def rows_of_slice(whole: Slice, rows: Sequence[int]) -> Slice:
    """The rows of `whole` with these numbers, as narrow as their sequences allow."""
    index = torch.tensor(rows, device=whole.batch.token_mask.device)
    prompts = whole.columns[0]
    known = whole.batch.sequences
    sequences = [known[row] for row in rows]
    before = max(len(sequence.prompt) for sequence in sequences)
    after = max(1, *(len(sequence.completion) for sequence in sequences))
    both, own = slice(prompts - before, prompts + after), slice(after)
    batch = RolloutBatch(
        input_ids=whole.batch.input_ids[index, both],
        attention_mask=whole.batch.attention_mask[index, both],
        token_mask=whole.batch.token_mask[index, own],
        sampler_logprobs=whole.batch.sampler_logprobs[index, own],
        advantages=whole.batch.advantages[index],
        known_sequences=sequences,
    )
    tensors = (getattr(whole, name) for name in KEPT)
    return Slice(batch, *(None if tensor is None else tensor[index, own] for tensor in tensors))
