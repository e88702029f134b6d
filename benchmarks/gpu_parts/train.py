"""A real run of the 1.5B shape with default settings and 128 completions a step: the peak of each phase.

The weights are random, the generator is `hf`, prompts have 512 tokens, completions 256. The peaks stand beside
those of `grpox plan --memory`; the one that decides is the update's, which fills a pass's budget of positions.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import torch
from memory_plan_point import LATER, Watched, watch_phases

from gpu_parts.memory import WatchedOnGpu, compared
from gpu_parts.models import QWEN_15B, TINY, described, write_model
from gpu_parts.part import Part

STEPS, PROMPT, COMPLETION = 2, 512, 256
TIMES = ("step_time", "time/generate", "time/update", "tokens_per_second")


def measure(part: Part) -> None:
    """Record the shape, MiB of each phase by the plan and measured, and the seconds of each step."""
    from grpox import train

    for module in LATER:
        importlib.import_module(module)
    watched = watch_phases(WatchedOnGpu if part.on_cuda else Watched)
    shape, prompt, completion = (TINY, 16, 8) if part.small else (QWEN_15B, PROMPT, COMPLETION)
    model = write_model(part.folder / "model", shape, part.device, torch.bfloat16)
    if part.on_cuda:
        torch.cuda.empty_cache()
    part.record("shape", described(shape))
    run: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"path": str(part.folder / "prompts.jsonl")},
        "rewards": ["exact"],
        "train": {"max_steps": STEPS, "gradient_accumulation_steps": 2 if part.small else 16},
        "generator": "hf",
        "sampling": {"max_completion_length": completion},
        "checkpoint": {"every": 0},
        "tracking": {},
        "output_dir": str(part.folder / "run"),
    }
    rows = [json.dumps({"prompt": "1" * prompt, "answer": str(number)}) for number in range(64)]
    (part.folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    part.attempt("memory", lambda: compared(part, watched, train, run, prompt))
    part.record("steps", steps_of(part))


def steps_of(part: Part) -> list[dict[str, Any]]:
    """Return the times of each step that was recorded."""
    log = part.folder / "run" / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [
        {name: value for name, value in record["metrics"].items() if name in TIMES or name.startswith("time")}
        for record in map(json.loads, lines)
        if "metrics" in record
    ]
