"""Completes and checks vLLM's replacing of weights, also where the head is the embedding.

Its CPU build packs the weights of experts when it starts, and of a head that is also the embedding, but not
when they are replaced: its kernels would compute with others. And some architectures copy into parameters that
have no memory while they are replaced, so that what is brought is lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import nn

T = TypeVar("T")
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


def untouched(model: nn.Module) -> list[str]:
    """Parameters that a reload has brought nothing for; asked before it is finished."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    left: dict[str, int] = {}
    brought: set[int] = set()
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        lasting = info.kernel_tensors[0] if info.kernel_tensors is not None else layer._parameters
        names = {name for name, _ in info.loaded_weights}
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            place = id(lasting.get(name, parameter))
            # One that has memory was loaded at once, or belongs to a layer that is complete.
            if parameter.is_meta and name not in names:
                left[f"{prefix}.{name}"] = place
            else:
                brought.add(place)
    # One that is shared, as a tied head is, may be brought under its other name.
    return [name for name, place in left.items() if place not in brought]


def pack_again(model: nn.Module) -> None:
    """Pack what has just been replaced; nothing where vLLM packs nothing."""
    layers = [layer for layer in model.modules() if getattr(layer, "quant_method", None) is not None]
    if not layers:
        return
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    for layer in layers if current_platform.is_cpu() else ():
        method = layer.quant_method
        if isinstance(layer, RoutedExperts) and isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        elif isinstance(layer, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)


def head_is_embedding(model: nn.Module) -> bool | None:
    """Return True where vLLM's model keeps one parameter for both, None where it has no other head.

    Ask before a reload, which takes them apart.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Where vLLM has wrapped a layer to give it adapters, its weight is one level below.
    if not any(name.startswith(HEAD.removesuffix("weight")) for name in parameters):
        return None
    head = parameters.get(HEAD)
    return head is not None and any(
        name.endswith(EMBEDDING) and parameter is head for name, parameter in parameters.items()
    )


def as_loaded(
    weights: Iterable[tuple[str, T]], tied: bool, one_parameter: bool | None
) -> Iterator[tuple[str, T]]:
    """Yield what to load for what the policy has: its tied embeddings are the head's weights too.

    The CPU build packs a head of its own out of what is loaded as the head, never of what is loaded as the
    embeddings. What is loaded as the head of one parameter is the embeddings' as well: under both names it
    would be copied and packed twice.

    Args:
        tied: as the model's config says.
        one_parameter: what `head_is_embedding` said.
    """
    for name, weight in weights:
        embedding = tied and one_parameter is not None and name.endswith(EMBEDDING)
        if not embedding or not one_parameter:
            yield name, weight
        if embedding:
            yield HEAD, weight
