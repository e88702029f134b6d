"""Weights from the trainer to a vLLM server over NCCL."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from gpu_parts.part import Part, Skipped


def measure(part: Part) -> None:
    """Record the figures of weight_sync.py, whose server has the second GPU."""
    if not part.on_cuda:
        raise Skipped("needs CUDA")
    if find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    if (count := torch.cuda.device_count()) < 2:
        raise Skipped(f"needs two GPUs, and {count} is here: NCCL refuses two ranks on one GPU")
    options = ("--model=quickstart", "--generators=server", "--server-gpu=1")
    part.record("weight_sync", part.run_script("weight_sync.py", *options))
