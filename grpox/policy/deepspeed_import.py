"""Imports DeepSpeed several seconds faster, without its probes of compilers, and on a CPU without warnings."""

from __future__ import annotations

import os

import torch

from grpox.runtime.lazy_imports import absent, compiled_at_first_call

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Otherwise it runs numactl in each backward pass, to divide by the number of accelerators.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))

with absent("mlflow"):  # for its autotuner
    import deepspeed
    from deepspeed.runtime import compiler
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
    from deepspeed.utils.z3_leaf_module import z3_leaf_parameter

# ZeRO-3 checks if its optimizer is Muon, and the module of Muon imports torch's compiler.
torch_compile, compiler.compile = compiler.compile, lambda: compiled_at_first_call
try:
    import deepspeed.runtime.zero.muon.original_muon
finally:
    compiler.compile = torch_compile

# It tests which of its ops can be compiled here: on a GPU machine each rank would run compilers for
# seconds. On a CPU it would then compile collectives in shared memory, in 35 to 95 s and behind a lock that a
# killed process never releases. Offload to nvme compiles its own op without asking.
deepspeed.ops.__compatible_ops__ = {}

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "deepspeed", "z3_leaf_parameter"]
