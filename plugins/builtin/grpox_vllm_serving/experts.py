"""Experts on vLLM's CPU build, which packs their weights when it starts and not when they are replaced.

Without more its kernel would read the new ones as if they were packed, and sample from another model.
"""

from __future__ import annotations

from torch import nn


def pack_experts(model: nn.Module) -> None:
    """Pack the weights of all experts, which have just been replaced; where vLLM packs none, do nothing."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, RoutedExperts) and isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
