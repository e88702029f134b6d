"""The generator vllm-colocate beside the trainer, as in the part `generator`."""

from __future__ import annotations

from importlib.util import find_spec

from gpu_parts.generator import measure_generator
from gpu_parts.part import Part, Skipped


def measure(part: Part) -> None:
    """Record mismatch and speed, where vLLM is installed."""
    if not part.on_cuda:
        raise Skipped("needs CUDA; on the CPU the tests sample with vLLM")
    if find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    measure_generator(part, "vllm-colocate")
