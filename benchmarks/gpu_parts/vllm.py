"""The generator vllm-colocate beside the trainer, as in the part `generator`."""

from __future__ import annotations

from gpu_parts.generator import measure_generator
from gpu_parts.part import Part


def measure(part: Part) -> None:
    """Record mismatch and speed."""
    measure_generator(part, "vllm-colocate")
