"""Completes and checks vLLM's replacement of weights, including models whose head shares the embedding.

vLLM's CPU build packs the weights of experts, and of a head that shares the embedding, when it starts, but not
when they are replaced: its kernels would compute with the old weights. Some architectures also copy into
parameters that have no memory during a replacement, so that the new weights are lost silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import nn

from grpox.errors import RunFailed
from grpox.toolkit import some

T = TypeVar("T")
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


def check_all_loaded(model: nn.Module) -> None:
    """Check that all parameters received weights in a reload; call it before the reload is finished.

    vLLM itself only reports how the load ended.

    Raises:
        RunFailed: some did not.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    left: dict[str, int] = {}
    brought: set[int] = set()
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        lasting = info.kernel_tensors[0] if info.kernel_tensors is not None else layer._parameters
        loaded = {name for name, _ in info.loaded_weights}
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            place = id(lasting.get(name, parameter))
            # A parameter with memory was loaded at once, or belongs to a complete layer.
            if parameter.is_meta and name not in loaded:
                left[f"{prefix}.{name}"] = place
            else:
                brought.add(place)
    # A shared parameter, such as a tied head, may be loaded under its other name.
    if names := [name for name, place in left.items() if place not in brought]:
        raise RunFailed(
            f"vLLM accepts no new weights for {some(names)}, so it would sample from a different model"
        )


def pack_again(model: nn.Module) -> None:
    """Pack the weights that have just been replaced; nothing if vLLM packs none."""
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
    """True if vLLM's model has one parameter for both, None if it has no separate head.

    Call it before a reload, which separates them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # If vLLM has wrapped a layer for adapters, its weight is one level below.
    if not any(name.startswith(HEAD.removesuffix("weight")) for name in parameters):
        return None
    head = parameters.get(HEAD)
    return head is not None and any(
        name.endswith(EMBEDDING) and parameter is head for name, parameter in parameters.items()
    )


def as_loaded(
    weights: Iterable[tuple[str, T]], tied: bool, one_parameter: bool | None
) -> Iterator[tuple[str, T]]:
    """Yield the weights to load for the policy's weights; tied embeddings are also the head's weights.

    The CPU build packs a separate head only from weights loaded under the head's name, never from the
    embeddings.
    If one parameter serves both, weights loaded as the head also set the embeddings: loading both names would
    copy and pack it twice.

    Args:
        tied: value of the model's config.
        one_parameter: result of `head_is_embedding`.
    """
    for name, weight in weights:
        embedding = tied and one_parameter is not None and name.endswith(EMBEDDING)
        if not embedding or not one_parameter:
            yield name, weight
        if embedding:
            yield HEAD, weight
