"""How weights are gathered out of their shards: in buckets of a size, or one by one through nvme buffers."""

from __future__ import annotations

import torch
from torch import nn

from grpox.weight_sync import _buckets


def parameters(*sizes: int) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{place}", nn.Parameter(torch.zeros(size))) for place, size in enumerate(sizes)]


def names(weights: list[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in _buckets(weights, bucket_bytes)]


def test_a_bucket_is_filled_and_never_overfilled() -> None:
    """Four bytes a weight: 8 + 8 fill 16 bytes, 12 do not fit to 8, and 20 are a bucket of their own."""
    assert names(parameters(2, 2, 2, 3, 5, 1), 16) == [["p0", "p1"], ["p2"], ["p3"], ["p4"], ["p5"]]


def test_the_size_of_a_shard_is_that_of_the_whole_parameter() -> None:
    weights = parameters(1, 1)
    weights[0][1].ds_numel = 4  # type: ignore[attr-defined]
    assert names(weights, 16) == [["p0"], ["p1"]]


def test_parameters_on_nvme_are_gathered_one_by_one() -> None:
    weights = parameters(1, 1, 1)
    for _, weight in weights:
        weight.nvme_swapper = object()  # type: ignore[attr-defined]
    assert names(weights, 1000) == [["p0"], ["p1"], ["p2"]]
