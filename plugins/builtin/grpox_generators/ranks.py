"""What generators tell each other across the ranks of a run."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from grpox.contracts import GeneratorContext


def any_rank(fact: bool, context: GeneratorContext) -> bool:
    """Whether `fact` holds on any rank; a collective."""
    if context.world_size == 1:
        return fact
    facts: list[Any] = [None] * context.world_size
    dist.all_gather_object(facts, fact)
    return any(facts)


def wait_for_all_ranks(context: GeneratorContext) -> None:
    """A collective."""
    if context.world_size > 1:
        dist.barrier()


def same_on_all_ranks(text: str, context: GeneratorContext) -> str:
    """That of rank 0; a collective."""
    if context.world_size == 1:
        return text
    texts = [text]
    dist.broadcast_object_list(texts, src=0)
    return texts[0]
