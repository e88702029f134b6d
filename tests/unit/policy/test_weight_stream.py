"""Gathering weights from shards: in buckets of a size, or one by one through nvme buffers."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from grpox.policy import weight_stream
from grpox.policy.weight_stream import _buckets, _lasting, stream_weights


def parameters(*sizes: int) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{place}", nn.Parameter(torch.zeros(size))) for place, size in enumerate(sizes)]


def names(weights: list[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in _buckets(weights, bucket_bytes)]


def test_a_bucket_is_filled_and_never_overfilled() -> None:
    """Four bytes a weight: 8 + 8 fill 16 bytes, 12 do not fit to 8, and 20 are a bucket of their own."""
    assert names(parameters(2, 2, 2, 3, 5, 1), 16) == [["p0", "p1"], ["p2"], ["p3"], ["p4"], ["p5"]]
    weights = parameters(1, 1)
    weights[0][1].ds_numel = 4  # type: ignore[attr-defined] # its shard has the size of the whole
    assert names(weights, 16) == [["p0"], ["p1"]]
    weights = parameters(1, 1, 1)
    for _, weight in weights:
        weight.nvme_swapper = object()  # type: ignore[attr-defined]
    assert names(weights, 1000) == [["p0"], ["p1"], ["p2"]]


def test_nothing_of_a_bucket_is_left_when_the_next_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(4)])
    given: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []

    def gathered(parameter: nn.Parameter) -> torch.Tensor:
        left.append(sum(tensor() is not None for tensor in given))
        return _lasting(parameter)

    monkeypatch.setattr(weight_stream, "_lasting", gathered)
    for _, tensor in stream_weights(module, bucket_bytes=16):
        given.append(weakref.ref(tensor))
        del tensor
    assert left == [0, 0, 0, 0]
    assert len(given) == 4


def test_what_is_gathered_is_not_copied_but_out_of_a_buffer_that_is_used_again() -> None:
    whole = nn.Parameter(torch.ones(4))
    assert _lasting(whole).data_ptr() == whole.data_ptr()
    whole.nvme_swapper = object()  # type: ignore[attr-defined]
    assert _lasting(whole).data_ptr() != whole.data_ptr()
