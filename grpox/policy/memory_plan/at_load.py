"""Refuses a model that a rank's GPU cannot hold whole, as it must before DeepSpeed shards it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grpox.errors import ConfigError, Problem
from grpox.errors.formatting import amount
from grpox.policy.memory_plan.formula import LOAD, parts_of, size_in
from grpox.policy.memory_plan.of_run import run_setting
from grpox.runfile.load import ResolvedRun

if TYPE_CHECKING:
    from grpox.runtime.world import World


def free_memory(world: World) -> int | None:
    """Bytes that the fullest of the ranks' GPUs has left for this run; None without GPUs. A collective."""
    if world.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(world.device)
    # What an earlier run of this process has let go of, and torch has kept.
    kept = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return min(world.gather([free + kept]))


def check_load(run: ResolvedRun, free: int | None) -> None:
    """Refuse a model that is too large for a GPU at the moment it loads.

    Args:
        free: bytes of the GPU that has least; None: there is none, or nobody knows.

    Raises:
        ConfigError: it would run out of memory, after minutes of reading weights.
    """
    needed = None if free is None else _needed(run)
    if free is None or needed is None or needed <= free:
        return
    model = run.config.model
    smaller = "model.dtype: bfloat16, " if model.dtype == "float32" else ""
    raise ConfigError(
        Problem(
            f"every rank holds the whole model on its GPU while it loads, which takes {amount(needed)} of the "
            f"{amount(free)} free there",
            "model.path",
            given=f"{model.path} in {model.dtype}",
            allowed=f"{smaller}a smaller model, or GPUs with more memory; neither more ranks nor offload "
            "changes it (grpox plan --memory)",
        )
    )


def _needed(run: ResolvedRun) -> int | None:
    """Bytes of a GPU while the model loads; None where they are not known."""
    given = run.given.model
    if given is not None:
        if given.device.type == "cuda":
            return None  # it is there already
        return int(sum(weight.numel() * weight.element_size() for weight in given.parameters()))
    try:
        setting = run_setting(run, gpu=True)
    except ConfigError:
        return None  # of what nobody can count; whether it loads at all, loading tells
    return size_in(parts_of(setting), LOAD, on_host=False)
