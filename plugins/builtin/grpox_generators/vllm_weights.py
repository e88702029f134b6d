"""The policy's weights under the names and shapes of its checkpoint, which vLLM loads, and what ranks exchange.

In memory, transformers keeps the experts of a layer in one tensor and uses other names for some weights.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

from grpox.contracts import GeneratorContext, WeightStream

Item = TypeVar("Item")


def from_all_ranks(item: Item, context: GeneratorContext) -> list[Item]:
    """Return each rank's `item`, in rank order; a collective."""
    items = [item] * context.world_size
    if context.world_size > 1:
        dist.all_gather_object(items, item)
    return items


def as_stored(model: PreTrainedModel, weights: WeightStream) -> WeightStream:
    """Yield the weights of `model` under the names and in the shapes of its files.

    This follows transformers' saving of a model, one weight at a time. Weights that form one weight in the
    files are stored until all of them have arrived.
    """
    loaded = getattr(model, "_weight_conversions", None)
    if loaded is None:  # without a load, those of its architecture
        known = get_model_conversion_mapping(model, add_legacy=False)
        loaded = [each for each in known if not isinstance(each, PrefixChange)]
    back = [conversion.reverse_transform() for conversion in reversed(list(loaded))]
    renamings = [each for each in back if isinstance(each, WeightRenaming)]
    converters = [each for each in back if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    begun: dict[str, Any] = {}

    def complete(name: str) -> WeightStream:
        converted = begun.pop(name).convert(name, model=model, config=model.config)
        for stored, weight in converted.items():
            # The receiver accepts only contiguous tensors.
            yield stored, (weight[0] if isinstance(weight, list) else weight).contiguous()

    for name, weight in weights:
        stored, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            yield stored, weight
            continue
        converter = begun.setdefault(stored, None) or copy.deepcopy(by_pattern[pattern])
        begun[stored] = converter
        converter.add_tensor(stored, name, pattern, weight)
        del weight
        if len(converter.collected_tensors) == len(converter.source_patterns):
            yield from complete(stored)
    for stored in list(begun):
        yield from complete(stored)
