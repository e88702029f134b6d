"""Imports for the second fork server: everything that a vLLM engine in the training process imports."""

from __future__ import annotations

import importlib
import os

from grpox_generators.vllm_colocate import ENVIRONMENT

LIBRARIES = (
    "sympy.tensor.tensor", "torch._dynamo.backends.cudagraphs", "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor", "torch._dynamo.dce_extra_outputs", "torch._export.db.logging",
    "torch._functorch._aot_autograd.subclass_codegen", "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.codegen.cpp_wrapper_cpu_array_ref", "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.cuda_combined_scheduling", "torch._inductor.codegen.halide",
    "torch._inductor.codegen.memory_planning", "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.wrapper_fxir", "torch._inductor.compile_fx", "torch._inductor.hooks",
    "torch._subclasses.schema_check_mode", "torch.distributed.tensor.experimental", "torch.export._trace",
    "torch.fx.experimental.validator", "torch.utils._cpp_embed_headers", "vllm",
    "vllm.distributed.elastic_ep.elastic_execute", "vllm.distributed.parallel_state",
    "vllm.entrypoints.anthropic.protocol", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.online.base", "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2", "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver", "vllm.sampling_params", "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn", "vllm.v1.core.sched.scheduler", "vllm.v1.engine.llm_engine",
    "vllm.v1.pool.flash_maxsim", "vllm.v1.worker.cpu_worker",
)  # fmt: skip
"""Imported by vLLM early or late."""

before = {name: os.environ.get(name) for name in ENVIRONMENT}
os.environ.update(ENVIRONMENT)
for library in LIBRARIES:
    importlib.import_module(library)
for name, value in before.items():  # a run sets them by itself
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value
