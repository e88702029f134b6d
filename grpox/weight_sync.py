"""The policy's weights out of their ZeRO-3 shards: a stream of (name, tensor), gathered bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from grpox.contracts import WeightStream

if TYPE_CHECKING:
    from torch import Tensor, nn

BUCKET_BYTES = 256 * 2**20


def stream_weights(module: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> WeightStream:
    """Yield every parameter whole, under its name; tied parameters once.

    A collective: every rank must exhaust the stream. At most one bucket is held whole at a time, and a
    consumer that stops or fails leaves no parameter gathered. What is yielded may be the engine's own memory,
    as the shard of a single rank is: to be read, and copied where it is kept beyond the next update.
    """
    import deepspeed

    for bucket in _buckets(module.named_parameters(), bucket_bytes):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
            whole = [(name, _lasting(parameter)) for name, parameter in reversed(bucket)]
        while whole:  # given away one by one: nothing of this bucket is left when the next is gathered
            yield whole.pop()


def _lasting(parameter: nn.Parameter) -> Tensor:
    """The gathered parameter, as a copy where its memory is taken again before it is read."""
    tensor = parameter.detach()
    return tensor.clone() if _swapped(parameter) else tensor


def _swapped(parameter: nn.Parameter) -> bool:
    """Whether it comes from nvme, through a buffer that the next parameter will take."""
    return getattr(parameter, "nvme_swapper", None) is not None


def _buckets(
    parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        # Under ZeRO-3 numel() is that of the local shard; ds_numel is the whole parameter's.
        needed = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        # From nvme each parameter comes through a buffer of its own, of which there are few.
        if bucket and (_swapped(parameter) or size + needed > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += needed
    if bucket:
        yield bucket
