"""Weights from the trainer to a vLLM server over NCCL."""

from __future__ import annotations

from gpu_parts.part import Part


def measure(part: Part) -> None:
    """Record the figures of weight_sync.py, whose server has the second GPU."""
    options = ("--model=quickstart", "--generators=server", "--server-gpu=1")
    part.record("weight_sync", part.run_script("weight_sync.py", *options))
