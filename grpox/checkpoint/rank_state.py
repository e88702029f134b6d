"""What a rank has besides the engine: slices of generation batches that are not used up, random numbers.

Plain values and tensors only, so that it can be read with ``weights_only=True``.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpox.checkpoint.dealt_anew import dealt_anew
from grpox.checkpoint.folders import rank_file
from grpox.checkpoint.manifest import sync
from grpox.checkpoint.progress import Progress
from grpox.checkpoint.rng import fresh_random_state, random_state, set_random_state
from grpox.checkpoint.same_batches import plan_of, same_steps
from grpox.rollout import RolloutBatch
from grpox.slices import Slice

if TYPE_CHECKING:
    from grpox.trainer import Trainer


def rank_state(trainer: Trainer) -> dict[str, Any]:
    """The state of this rank, between two steps."""
    slices = [(*place, slice_state(slice_)) for place, slice_ in trainer.slices.items()]
    return {"slices": slices, "random": random_state()}


def restore_rank(trainer: Trainer, folder: Path, progress: Progress) -> None:
    """Make this rank what it was; last of all, because building anything may draw random numbers.

    Where the run splits its batches in another way now, rollouts in flight are dealt anew; where its batches
    are others, they are forgotten.
    """
    saved, plan = plan_of(progress.config, progress.world_size), trainer.schedule.plan
    rank, seed = trainer.world.rank, trainer.context.config.train.seed
    if saved == plan:
        state = read_state(rank_file(folder, rank))
        slices = _slices(state)
    else:
        states = [read_state(rank_file(folder, each)) for each in range(progress.world_size)]
        state = (
            states[rank] if rank < len(states) else {"random": fresh_random_state(seed, rank, progress.step)}
        )
        held = [_slices(each) for each in states] if same_steps(saved, plan) else []
        slices = dealt_anew(held, saved, trainer.schedule, rank, trainer.pad_token_id)
    trainer.slices = {
        place: slice_of(slice_state(slice_), trainer.world.device) for place, slice_ in slices.items()
    }
    set_random_state(state["random"])


def write_state(state: dict[str, Any], path: Path) -> None:
    """On disk when this returns."""
    torch.save(state, path)
    sync(path)


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def slice_state(slice_: Slice) -> dict[str, Any]:
    """A micro-batch of this rank as plain tensors."""
    batch = {field.name: getattr(slice_.batch, field.name) for field in fields(RolloutBatch)}
    return {"batch": batch, "old": slice_.old_logprobs, "reference": slice_.reference_logprobs}


def slice_of(state: dict[str, Any], device: torch.device) -> Slice:
    """What `slice_state` was given, on `device`."""
    batch = RolloutBatch(**{name: tensor.to(device) for name, tensor in state["batch"].items()})
    old, reference = (None if t is None else t.to(device) for t in (state["old"], state["reference"]))
    return Slice(batch, old, reference)


def _slices(state: dict[str, Any]) -> dict[tuple[int, int], Slice]:
    read = torch.device("cpu")
    return {(generation, first): slice_of(held, read) for generation, first, held in state["slices"]}
