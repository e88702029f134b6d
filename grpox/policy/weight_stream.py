"""The policy's weights gathered from their ZeRO-3 shards, bucket by bucket: a stream of (name, tensor).

The stream has the content of a model checkpoint: the parameters, and the buffers of the state dict, which are
not trained but may change in a forward pass. ZeRO-3 keeps buffers whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from grpox.contracts import WeightStream
from grpox.policy.lora.layers import (
    Factors,
    adapted_layers,
    adapted_weight,
    adapter_parameters,
    base_parameters,
    factors_of,
    of_base,
    parameters_of,
)

BUCKET_BYTES = 256 * 2**20


def stream_weights(module: nn.Module, bucket_bytes: int = BUCKET_BYTES, adapted: bool = True) -> WeightStream:
    """Yield every whole parameter by name (tied parameters once), then the persistent buffers.

    If adapters are trained (`grpox.policy.lora`), each is merged into its layer's weight, and the names are
    those of the model without adapters. A merged weight is a new tensor; only one exists at a time.

    A collective: every rank must exhaust the stream. At most one bucket is whole at a time, and a consumer that
    stops or fails leaves no parameter gathered. A yielded tensor may be the engine's own memory, for example
    the shard of a single rank: read it, and copy it if you need it after the next update.

    Args:
        adapted: look for adapters; False for a module that has none.
    """
    parameters, buffers, by_weight = module.named_parameters(), persistent_buffers(module), {}
    if adapted:
        parameters, buffers = base_parameters(module), base_buffers(module)
        by_weight = {id(adapted_weight(layer)): layer for layer in adapted_layers(module).values()}
    yield from stream_parameters(parameters, bucket_bytes, by_weight)
    for name, buffer in buffers:
        yield name, buffer.detach()


def stream_parameters(
    named: Iterable[tuple[str, nn.Parameter]],
    bucket_bytes: int = BUCKET_BYTES,
    adapted: Mapping[int, Any] | None = None,
) -> WeightStream:
    """Yield each whole parameter of `named`, as `stream_weights` does.

    Args:
        adapted: id of a parameter -> the layer whose adapter is merged into it.
    """
    import deepspeed

    layers = adapted or {}
    for bucket in _buckets(named, bucket_bytes):
        adapters = [layers.get(id(parameter)) for _, parameter in bucket]
        gathered = [parameter for _, parameter in bucket]
        for layer in adapters:
            gathered += [] if layer is None else parameters_of(layer)
        whole = []
        with deepspeed.zero.GatheredParameters(gathered):
            for (name, parameter), layer in zip(reversed(bucket), reversed(adapters), strict=True):
                whole.append((name, _lasting(parameter), None if layer is None else _factors(layer)))
        while whole:  # released one by one, so that this bucket is gone before the next is gathered
            yield _merged(*whole.pop())


def is_own_memory(parameter: nn.Parameter, tensor: Tensor) -> bool:
    """Return True if `tensor`, streamed for a parameter under ZeRO-3, is the memory of the policy's own weight.

    This is so on a single rank, whose shard is the whole parameter. Each update changes it.
    """
    shard = getattr(parameter, "ds_tensor", None)
    return shard is not None and (shard.device, shard.data_ptr(), shard.numel()) == (
        tensor.device,
        tensor.data_ptr(),
        tensor.numel(),
    )


def _merged(name: str, weight: Tensor, factors: Factors | None) -> tuple[str, Tensor]:
    return name, weight if factors is None else factors.merged(weight)


def _factors(layer: Any) -> Factors:
    down, up = map(_lasting, parameters_of(layer))
    return factors_of(layer, down, up)


def _lasting(parameter: nn.Parameter) -> Tensor:
    """Return the gathered parameter, as a copy if its memory is reused before the parameter is read."""
    tensor = parameter.detach()
    return tensor.clone() if _swapped(parameter) else tensor


def _swapped(parameter: nn.Parameter) -> bool:
    """Return True if the parameter comes from nvme, through a buffer that the next parameter reuses."""
    return getattr(parameter, "nvme_swapper", None) is not None


def _buckets(
    parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        # Under ZeRO-3 numel() counts the local shard; ds_numel counts the whole parameter.
        needed = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        # Each parameter on nvme is read through its own buffer, and there are few buffers.
        if bucket and (_swapped(parameter) or size + needed > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += needed
    if bucket:
        yield bucket


def base_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the buffers in a checkpoint, under their names in a model without adapters."""
    return of_base(model, persistent_buffers(model))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the state dict by name; a buffer with several names comes once."""
    seen: set[int] = set()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        parent, _, own = name.rpartition(".")
        if own not in model.get_submodule(parent)._non_persistent_buffers_set and id(buffer) not in seen:
            seen.add(id(buffer))
            yield name, buffer


def stream_base(model: nn.Module) -> WeightStream:
    """Yield the frozen weights and the buffers under the names of a model without adapters; a collective."""
    yield from stream_parameters(base_parameters(model))
    yield from ((name, buffer.detach()) for name, buffer in base_buffers(model))


def stream_adapters(model: nn.Module) -> WeightStream:
    """Yield A and B of every layer under peft's names in a file; a collective."""
    return stream_parameters(adapter_parameters(model))
