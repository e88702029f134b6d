"""The update on several ranks: the gradients agree with those of bare loops, and how fast it is."""

from __future__ import annotations

import torch

from gpu_parts.part import Part, Skipped


def measure(part: Part) -> None:
    """Record the figures of update.py on all GPUs."""
    if not part.on_cuda:
        raise Skipped("needs several GPUs; on the CPU the tests take steps on two ranks")
    if (count := torch.cuda.device_count()) < 2:
        raise Skipped(f"needs several GPUs, and {count} is here: NCCL refuses two ranks on one GPU")
    ranks = 2 ** (count.bit_length() - 1)
    options = ("--quick", f"--ranks={ranks}", f"--micro-batch={max(8, ranks)}")
    part.record("update", part.run_script("update.py", *options, "--candidates=grpox,bare-zero3,torch"))
