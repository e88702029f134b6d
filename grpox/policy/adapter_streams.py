"""Weights of a model with adapters out of their ZeRO-3 shards: the base, the adapters, or all as they are.

Merged, as everything else wants them, they come from `grpox.policy.weight_stream.stream_weights`.
"""

from __future__ import annotations

from torch import nn

from grpox.contracts import WeightStream
from grpox.policy.lora.layers import adapter_parameters, base_buffers, base_parameters
from grpox.policy.weight_stream import stream_buffers, stream_parameters


def stream_base(model: nn.Module) -> WeightStream:
    """The frozen weights and the buffers under the names of a model without adapters; a collective."""
    yield from stream_parameters(base_parameters(model))
    yield from stream_buffers(base_buffers(model))


def stream_adapters(model: nn.Module) -> WeightStream:
    """A and B of every layer, under peft's names in a file; a collective."""
    return stream_parameters(adapter_parameters(model))


def stream_as_trained(model: nn.Module) -> WeightStream:
    """Every parameter under its own name in `model`; a collective."""
    return stream_parameters(model.named_parameters())
