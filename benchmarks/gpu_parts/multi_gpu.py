"""The update on several ranks: the gradients agree with those of bare loops, and how fast it is."""

from __future__ import annotations

import torch

from gpu_parts.part import Part


def measure(part: Part) -> None:
    """Record the figures of update.py on all GPUs."""
    ranks = 2 ** (torch.cuda.device_count().bit_length() - 1)
    options = ("--quick", f"--ranks={ranks}", f"--micro-batch={max(8, ranks)}")
    part.record("update", part.run_script("update.py", *options, "--candidates=grpox,bare-zero3,torch"))
