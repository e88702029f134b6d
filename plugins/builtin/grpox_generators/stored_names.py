"""The policy's weights under the names and shapes of its checkpoint, which vLLM loads.

In memory, transformers keeps the experts of a layer in one tensor and uses other names for some weights.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

from grpox.contracts import WeightStream


def as_stored(model: PreTrainedModel, weights: WeightStream) -> WeightStream:
    """Yield the weights of `model` under the names and in the shapes of its files.

    This follows transformers' saving of a model, one weight at a time. Weights that form one weight in the
    files are stored until all of them have arrived.
    """
    back = [conversion.reverse_transform() for conversion in reversed(_conversions(model))]
    renamings = [each for each in back if isinstance(each, WeightRenaming)]
    converters = [each for each in back if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    begun: dict[str, Any] = {}
    for name, weight in weights:
        stored, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            yield stored, weight
            continue
        if stored not in begun:
            begun[stored] = copy.deepcopy(by_pattern[pattern])
        converter = begun[stored]
        converter.add_tensor(stored, name, pattern, weight)
        del weight
        if len(converter.collected_tensors) == len(converter.source_patterns):
            yield from _converted(model, stored, begun.pop(stored))
    for stored, converter in begun.items():
        yield from _converted(model, stored, converter)


def _converted(model: PreTrainedModel, name: str, converter: Any) -> WeightStream:
    for stored, weight in converter.convert(name, model=model, config=model.config).items():
        # The receiver accepts only contiguous tensors.
        yield stored, (weight[0] if isinstance(weight, list) else weight).contiguous()


def _conversions(model: PreTrainedModel) -> list[Any]:
    """Return the conversions by which `model` was loaded; without a load, those of its architecture."""
    loaded = getattr(model, "_weight_conversions", None)
    if loaded is not None:
        return list(loaded)
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in known if not isinstance(each, PrefixChange)]
