"""Rollouts in flight, dealt to the ranks and micro-batches of another split: the same rows for each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grpox.data.schedule import BatchPlan, Schedule
from grpox.policy.batch import RolloutBatch
from grpox.update.micro_batch import Slice

Slices = dict[tuple[int, int], Slice]
"""A rank's slices, by generation and first row."""


@dataclass(frozen=True)
class _Row:
    """One rollout without its padding: P tokens of the prompt, T of the completion."""

    prompt: Tensor  # i64[P]
    completion: Tensor  # i64[T]
    token_mask: Tensor  # bool[T]
    sampler_logprobs: Tensor  # f32[T]
    advantage: Tensor  # f32[]
    old_logprobs: Tensor | None  # f32[T]
    reference_logprobs: Tensor | None  # f32[T]


def dealt_anew(
    held: list[Slices], saved: BatchPlan, schedule: Schedule, rank: int, pad_token_id: int
) -> Slices:
    """The slices of `rank` under the plan of `schedule`.

    Args:
        held: of each rank of the run that was saved, whose plan was `saved`.
    """
    generations: dict[int, dict[int, _Row]] = {}
    for saved_rank, slices in enumerate(held):
        for (generation, first), slice_ in slices.items():
            start = first + saved_rank * saved.per_device_train_batch_size
            rows = generations.setdefault(generation, {})
            rows.update(enumerate(_rows(slice_), start))
    return {
        (generation, micro_batch.rows.start): _slice(
            [rows[row] for row in micro_batch.rank_rows(rank)], pad_token_id
        )
        for generation, rows in generations.items()
        for micro_batch in schedule.slices_of(generation)
    }


def _rows(slice_: Slice) -> Iterator[_Row]:
    batch = slice_.batch
    longest = batch.token_mask.shape[1]
    for row, attention in enumerate(batch.attention_mask.bool()):
        prompt, completion = attention[:-longest], attention[-longest:]

        def cut(tensor: Tensor | None, row: int = row, kept: Tensor = completion) -> Tensor | None:
            return None if tensor is None else tensor[row][kept]

        yield _Row(
            prompt=batch.input_ids[row, :-longest][prompt],
            completion=batch.completion_ids[row][completion],
            token_mask=batch.token_mask[row][completion],
            sampler_logprobs=batch.sampler_logprobs[row][completion],
            advantage=batch.advantages[row],
            old_logprobs=cut(slice_.old_logprobs),
            reference_logprobs=cut(slice_.reference_logprobs),
        )


def _slice(rows: list[_Row], pad_token_id: int) -> Slice:
    longest = max(1, *(len(row.completion) for row in rows))
    width = max(len(row.prompt) for row in rows)

    def right(tensors: list[Tensor], fill: float) -> Tensor:
        return torch.stack([_filled(tensor, longest - len(tensor), fill) for tensor in tensors])

    def left(tensors: list[Tensor], fill: float) -> Tensor:
        return torch.stack([_filled(tensor.flip(0), width - len(tensor), fill).flip(0) for tensor in tensors])

    def kept(tensors: list[Tensor | None]) -> Tensor | None:
        there = [tensor for tensor in tensors if tensor is not None]
        # Where some rows have not been scored yet, all of the slice are, when it is trained on.
        return right(there, 0.0) if len(there) == len(tensors) else None

    prompts, completions = [row.prompt for row in rows], [row.completion for row in rows]
    ids = [left(prompts, pad_token_id), right(completions, pad_token_id)]
    masks = [
        left([torch.ones_like(ids) for ids in prompts], 0),
        right([torch.ones_like(i) for i in completions], 0),
    ]
    batch = RolloutBatch(
        input_ids=torch.cat(ids, dim=1),
        attention_mask=torch.cat(masks, dim=1),
        token_mask=right([row.token_mask for row in rows], 0),
        sampler_logprobs=right([row.sampler_logprobs for row in rows], torch.nan),
        advantages=torch.stack([row.advantage for row in rows]),
    )
    old, reference = [row.old_logprobs for row in rows], [row.reference_logprobs for row in rows]
    return Slice(batch, kept(old), kept(reference))


def _filled(tensor: Tensor, missing: int, fill: float) -> Tensor:
    return torch.cat([tensor, tensor.new_full((missing,), fill)])
