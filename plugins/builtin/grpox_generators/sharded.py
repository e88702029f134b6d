"""Generating through the policy's own ZeRO-3 shards: each layer is gathered for each token, on all ranks.

A gather is a collective, so all ranks must run the same number of forwards. Within a batch transformers sees to
that (synced_gpus); here are the rest: as many batches on each rank, and rows for a rank that has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria


@contextmanager
def generating(policy: Any) -> Iterator[None]:
    """The policy as a generator of tokens: in evaluation mode, which also turns gradient checkpointing off (it
    forbids a cache of keys and values), and without the checkpoint's defaults for sampling."""
    training, defaults = policy.training, policy.generation_config
    policy.eval()
    policy.generation_config = GenerationConfig()
    try:
        yield
    finally:
        policy.generation_config = defaults
        policy.train(training)


def most_of_all_ranks(number: int) -> int:
    """The largest `number` of all ranks; a collective."""
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


class Idle(StoppingCriteria):  # type: ignore[misc]
    """Ends all rows at once: its rank only follows the forwards of the others."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def keep(self, kept: Tensor) -> None:
        """Never called: where ranks go in step, no row leaves."""
