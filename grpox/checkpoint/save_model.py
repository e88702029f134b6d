"""The policy as a plain Hugging Face folder: safetensors, config, tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from grpox.checkpoint.folders import checkpoints_in
from grpox.errors import RunFailed
from grpox.policy.engine import Engine
from grpox.policy.saved_whole import save_whole
from grpox.runtime.files import put_in_place, unwritten
from grpox.runtime.world import World


def save_model(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    folder: Path,
    world: World,
) -> None:
    """Gather the weights bucket by bucket and write them on rank 0, whole or not at all; a collective.

    Raises:
        RunFailed: they cannot be written, on every rank; or a reload would not find all of them. What stood in
            their place is still there.
    """
    state = {}
    for name, tensor in engine.weights():
        if world.is_main:
            state[name] = tensor.cpu()
    size, failure = sum(tensor.nbytes for tensor in state.values()), ""
    if world.is_main:
        unfinished = folder.with_name(folder.name + ".unfinished")
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            save_whole(engine.module, unfinished, state)
            tokenizer.save_pretrained(unfinished)
            if generation_config is not None:
                generation_config.save_pretrained(unfinished)
            put_in_place(unfinished, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            failure = f"the model is not saved: {unwritten(error, folder, size)}\n    {_rest(folder)}"
        except RunFailed as error:
            failure = f"{error}\n    {_rest(folder)}"
    if any(failures := world.gather([failure])):
        raise RunFailed("".join(failures))


def _rest(folder: Path) -> str:
    """What is left of the run whose model was to be `folder`."""
    checkpoints = checkpoints_in(folder.parent)
    if not checkpoints:
        return "there is no checkpoint to go on from (checkpoint.every says when one is saved)"
    return f"make room, then go on from {checkpoints[0]}: grpox train --resume {folder.parent}"
