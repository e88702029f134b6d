"""A checkpoint of another number of ranks, through DeepSpeed's universal checkpoint: each parameter in a file.

What DeepSpeed 0.19 does wrong as it loads one is made good here: it gives every group of parameters the
settings of the first (weight decay to biases and norms), and all of them one counter of steps, which each of
them then advances. Buffers it leaves as the model came with them.
"""

from __future__ import annotations

import io
import shutil
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpox.checkpoint.shards import only_weights
from grpox.errors import RunFailed, describe, text_of
from grpox.policy.buffers import persistent_buffers
from grpox.policy.engine import Engine

_OPTIMIZER = Path("zero") / "optimizer_state.pt"
"""Where it keeps what belongs to no single parameter."""


def load_of_other_ranks(engine: Engine, folder: Path, name: str, steps: int) -> None:
    """Read what `Engine.save` wrote after `steps` steps on another number of ranks; a collective.

    `folder` needs room for it twice more: rank 0 converts DeepSpeed's files, beside the checkpoint, and removes
    them afterwards.

    Raises:
        RunFailed: it cannot be converted.
    """
    world = engine.world
    # A name that `clear_unfinished` removes too, if the run is killed meanwhile.
    converted = folder.with_name(f".{folder.name}.universal.unfinished")
    failure = _convert(folder / name, converted) if world.is_main else ""
    try:
        told = [each for each in world.gather([failure]) if each]
        if told:
            raise RunFailed(f"{folder} cannot be taken to another number of ranks: {told[0]}")
        _load_universal(engine.deepspeed, converted / name)
    finally:
        world.barrier()
        if world.is_main:
            shutil.rmtree(converted, ignore_errors=True)
    _load_buffers(engine.module, folder / name)
    engine.steps = steps


def _load_universal(engine: Any, folder: Path) -> None:
    """Make a DeepSpeed engine what `folder`, a universal checkpoint, says; a collective."""
    engine._config.load_universal_checkpoint = True
    try:
        with only_weights():
            loaded, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
            saved = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
    finally:
        engine._config.load_universal_checkpoint = False
    if loaded is None:
        raise RunFailed(f"DeepSpeed finds no checkpoint in {folder}")
    _mend(engine.optimizer, saved["param_groups"])


@torch.no_grad()
def _load_buffers(model: nn.Module, engine_folder: Path) -> None:
    """Give `model` the buffers that rank 0 had when DeepSpeed's folder of a checkpoint was written."""
    from deepspeed.utils import zero_to_fp32

    with only_weights():
        file = zero_to_fp32.get_model_state_file(str(engine_folder), zero_stage=3)
        held = torch.load(file, map_location="cpu", weights_only=True)["module"]
    for name, buffer in persistent_buffers(model):
        buffer.copy_(held[name])


def _mend(sharded: Any, saved: list[dict[str, Any]]) -> None:
    """Give each group its own settings, and each shard its own counter, where PyTorch's AdamW wants it."""
    optimizer = sharded.optimizer
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})
    for place, shard in enumerate(sharded.fp32_partitioned_groups_flat):
        group, state = optimizer.param_groups[sharded.sub_group_to_group_id[place]], optimizer.state[shard]
        on_device = group.get("fused") or group.get("capturable")
        if torch.is_tensor(state["step"]):
            state["step"] = state["step"].to(shard.device if on_device else "cpu", copy=True)


def _convert(source: Path, folder: Path) -> str:
    """Why it failed, or nothing."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(folder, ignore_errors=True)
    arguments = Namespace(
        input_folder=str(source),
        output_folder=str(folder / source.name),
        # In this process, where nothing but weights is read.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    try:
        with only_weights(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ds_to_universal.main(arguments)
    except KeyError as error:
        return f"DeepSpeed converts the state of Adam alone, and the optimizer has no {text_of(error)}"
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait to hear of it
        return describe(error)
    return ""
