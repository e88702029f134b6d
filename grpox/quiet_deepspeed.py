"""DeepSpeed, imported without its warning that it found no accelerator where there is none."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "deepspeed"]
