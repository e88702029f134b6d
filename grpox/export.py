"""The policy as a plain Hugging Face folder: safetensors, config, tokenizer."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from grpox.engine import Engine
from grpox.world import World


def save_model(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    folder: Path,
    world: World,
) -> None:
    """Gather the weights bucket by bucket and write them on rank 0, whole or not at all; a collective."""
    state = {}
    for name, tensor in engine.weights():
        if world.is_main:
            state[name] = tensor.cpu()
    if world.is_main:
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        engine.module.save_pretrained(unfinished, state_dict=state)
        tokenizer.save_pretrained(unfinished)
        if generation_config is not None:
            generation_config.save_pretrained(unfinished)
        if folder.exists():
            # It may hold an earlier model, the base of this run or anything else of the user's: keep it.
            aside = folder.parent / "earlier" / f"{folder.name}-{time.time_ns()}"
            aside.parent.mkdir(exist_ok=True)
            folder.rename(aside)
        unfinished.rename(folder)
    world.barrier()
