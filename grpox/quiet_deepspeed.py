"""DeepSpeed, imported so that on the CPU it neither warns nor looks for what is known."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Else it runs numactl in each backward pass, to divide by the number of accelerators.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))

import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "deepspeed"]
