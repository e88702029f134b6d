"""Ragged batches that reach every branch of losses and corrections, and other layouts of the same rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MicroBatch = dict[str, Tensor]
T = 9


@dataclass(frozen=True)
class Row:
    """Fixed values of a row; its tokens are random around them."""

    tokens: int
    advantage: float
    log_ratio: float
    """Mean of log pi - log pi_old: its exponential is the ratio of the sequence."""
    gap: float
    """Mean of log pi_old - log mu."""


ROWS = (
    Row(tokens=5, advantage=1.3, log_ratio=-0.6, gap=0.0003),
    Row(tokens=1, advantage=0.7, log_ratio=0.05, gap=0.0),
    Row(tokens=6, advantage=0.4, log_ratio=0.6, gap=0.4),
    Row(tokens=3, advantage=-1.1, log_ratio=-0.7, gap=0.25),
    Row(tokens=4, advantage=-0.5, log_ratio=0.02, gap=-0.35),
    Row(tokens=2, advantage=-0.9, log_ratio=0.5, gap=0.1),
    Row(tokens=5, advantage=-0.3, log_ratio=1.4, gap=-0.0002),
    Row(tokens=0, advantage=2.0, log_ratio=0.0, gap=0.0),
    Row(tokens=4, advantage=0.0, log_ratio=-0.1, gap=0.5),
    Row(tokens=7, advantage=0.9, log_ratio=0.08, gap=-0.05),
)


def ragged_batch(seed: int = 0) -> MicroBatch:
    """`ROWS` as one micro-batch with advantages f64[B]; masks have holes, as of tools' tokens."""
    draw = random.Random(seed)
    shape = (len(ROWS), T)
    old = torch.tensor([[draw.uniform(-4, -1) for _ in range(T)] for _ in ROWS], dtype=torch.float64)
    batch = {
        "logprobs": old.clone(),
        "old_logprobs": old,
        "advantages": torch.tensor([row.advantage for row in ROWS], dtype=torch.float64),
        "token_mask": torch.zeros(shape, dtype=torch.bool),
        "sampler_logprobs": old.clone(),
        "ref_logprobs": old + torch.tensor([[draw.gauss(0, 0.8) for _ in range(T)] for _ in ROWS]).double(),
        "entropy": torch.tensor([[draw.uniform(0, 3) for _ in range(T)] for _ in ROWS], dtype=torch.float64),
    }
    for i, row in enumerate(ROWS):
        positions = sorted(draw.sample(range(T), row.tokens))
        batch["token_mask"][i, positions] = True
        batch["logprobs"][i, positions] += around(row.log_ratio, row.tokens, 0.9, draw)
        batch["sampler_logprobs"][i, positions] -= around(row.gap, row.tokens, 1.8, draw)
    unknown = batch["token_mask"][8].nonzero()[0]
    batch["sampler_logprobs"][8, unknown] = torch.nan
    return batch


def around(mean: float, count: int, spread: float, draw: random.Random) -> Tensor:
    """f64[count] random numbers with exactly this mean."""
    noise = torch.tensor([draw.uniform(-spread, spread) for _ in range(count)], dtype=torch.float64)
    return noise - noise.mean() + mean if count else noise


def with_token_advantages(batch: MicroBatch, seed: int = 1) -> MicroBatch:
    """The batch with an advantage of its own for every token: f64[B, T], both signs in a row."""
    draw = torch.Generator().manual_seed(seed)
    advantages = torch.randn(batch["token_mask"].shape, generator=draw, dtype=torch.float64)
    return {**batch, "advantages": advantages}


def take(batch: MicroBatch, rows: Sequence[int]) -> MicroBatch:
    """These rows, in this order, as a micro-batch."""
    return {key: value[list(rows)] for key, value in batch.items()}


def split(batch: MicroBatch, parts: Sequence[Sequence[int]]) -> list[MicroBatch]:
    return [take(batch, rows) for rows in parts]


def joined(gradients: Sequence[Tensor], parts: Sequence[Sequence[int]]) -> Tensor:
    """The gradients of micro-batches as one f64[B, T], in the order of the batch they were split from."""
    order = [row for rows in parts for row in rows]
    together = torch.cat(list(gradients))
    return together[torch.tensor(order).argsort()]


def widened(batch: MicroBatch, columns: int) -> MicroBatch:
    """The batch with padding on the right: T grows by `columns`."""
    return {
        key: torch.cat([value, value.new_zeros(len(value), columns)], dim=1) if value.dim() == 2 else value
        for key, value in batch.items()
    }


def with_garbage(batch: MicroBatch, garbage: float) -> MicroBatch:
    """`garbage` at the masked positions of everything, and as the advantage of rows that have no token."""
    mask = batch["token_mask"]
    dirty = {"token_mask": mask}
    for key, value in batch.items():
        if key != "token_mask":
            unused = ~mask if value.dim() == 2 else ~mask.any(dim=1)
            dirty[key] = value.masked_fill(unused, garbage)
    return dirty
