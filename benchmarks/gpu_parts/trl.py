"""The same run through grpox and TRL, by vs_trl.py."""

from __future__ import annotations

import torch

from gpu_parts.models import QWEN_05B, TINY, write_model
from gpu_parts.part import Part


def measure(part: Part) -> None:
    """Record TRL's seconds over grpox's on the quickstart's model, and on a larger one in bfloat16."""
    if not part.small:
        part.attempt("quickstart", lambda: part.run_script("vs_trl.py", "--steps=12", "--repeats=1"))
    shape, longest, rows, steps = (TINY, 8, 8, 2) if part.small else (QWEN_05B, 256, 16, 4)
    folder = write_model(part.folder / "model", shape, part.device, torch.bfloat16)
    settings = (
        f"model.dtype={'bfloat16' if part.on_cuda else 'float32'}",
        f"sampling.max_completion_length={longest}",
        f"train.per_device_train_batch_size={rows}",
        "train.gradient_accumulation_steps=4",
        "train.num_generations=8",
    )
    larger = (f"--steps={steps}", "--repeats=1", f"--model-path={folder}", *settings)
    part.attempt("0.5B", lambda: part.run_script("vs_trl.py", *larger))
