"""The same run through grpox and TRL, by vs_trl.py."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from gpu_parts.models import QWEN_05B, write_model
from gpu_parts.part import Part, Skipped


def measure(part: Part) -> None:
    """Record TRL's seconds over grpox's on the quickstart's model and, on a GPU, on a larger one."""
    if find_spec("trl") is None:
        raise Skipped("TRL is not installed, which `make dev` does")
    part.attempt("quickstart", lambda: part.run_script("vs_trl.py", *options(part)))
    if part.small:
        return
    folder = write_model(part.folder / "model", QWEN_05B, part.device, torch.bfloat16)
    settings = (
        "model.dtype=bfloat16",
        "sampling.max_completion_length=256",
        "train.per_device_train_batch_size=16",
        "train.gradient_accumulation_steps=4",
        "train.num_generations=8",
    )
    larger = ("--steps=4", "--repeats=1", f"--model-path={folder}", *settings)
    part.attempt("0.5B", lambda: part.run_script("vs_trl.py", *larger))


def options(part: Part) -> tuple[str, ...]:
    return ("--quick",) if part.small else ("--steps=12", "--repeats=1")
