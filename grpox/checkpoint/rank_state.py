"""What a rank has besides the engine: generation batches that are not used up or begun, random numbers.

Plain values and tensors only, so that it can be read with ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpox.checkpoint.dealt_anew import dealt_anew
from grpox.checkpoint.folders import rank_file
from grpox.checkpoint.progress import Progress
from grpox.checkpoint.rng import fresh_random_state, random_state, set_random_state
from grpox.checkpoint.same_batches import plan_of, same_steps
from grpox.checkpoint.training_state import TrainingState
from grpox.contracts import Rollout
from grpox.policy.batch import RolloutBatch
from grpox.rollout.prefetch import Begun
from grpox.runtime.collective_errors import on_every_rank
from grpox.runtime.files import sync
from grpox.runtime.world import World
from grpox.update.micro_batch import Slice


def rank_state(trainer: TrainingState) -> dict[str, Any]:
    """The state of this rank, between two steps; a collective. What is being sampled is waited for."""
    slices = [(*place, slice_state(slice_)) for place, slice_ in trainer.slices.items()]
    begun = on_every_rank(trainer.world, trainer.times, partial(_begun_states, trainer))
    return {"slices": slices, "begun": begun, "random": random_state()}


def _begun_states(trainer: TrainingState) -> dict[int, dict[str, Any]]:
    return {generation: begun_state(begun) for generation, begun in trainer.begun.items()}


def restore_rank(trainer: TrainingState, folder: Path, progress: Progress) -> None:
    """Make this rank what it was; last of all, because building anything may draw random numbers.

    Where the run splits its batches in another way now, rollouts in flight are dealt anew; where its batches
    are others, they are forgotten.
    """
    saved, plan = plan_of(progress.config, progress.world_size), trainer.schedule.plan
    rank, seed = trainer.world.rank, trainer.context.config.train.seed
    if saved == plan:
        state = read_state(rank_file(folder, rank))
        slices, begun = _slices(state), _begun([state], trainer.world)
    else:
        states = [read_state(rank_file(folder, each)) for each in range(progress.world_size)]
        state = (
            states[rank] if rank < len(states) else {"random": fresh_random_state(seed, rank, progress.step)}
        )
        kept = states if same_steps(saved, plan) else []
        held = [_slices(each) for each in kept]
        slices = dealt_anew(held, saved, trainer.schedule, rank, trainer.pad_token_id)
        begun = _begun(kept, trainer.world)
    trainer.slices = {
        place: slice_of(slice_state(slice_), trainer.world.device) for place, slice_ in slices.items()
    }
    trainer.begun = begun
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
    held = {field.name: getattr(slice_.batch, field.name) for field in fields(RolloutBatch)}
    batch = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    return {
        "batch": batch,
        "old": slice_.old_logprobs,
        "reference": slice_.reference_logprobs,
        "policy_keep": slice_.policy_keep,
    }


def slice_of(state: dict[str, Any], device: torch.device) -> Slice:
    """What `slice_state` was given, on `device`."""
    batch = RolloutBatch(**{name: tensor.to(device) for name, tensor in state["batch"].items()})
    kept = (state["old"], state["reference"], state.get("policy_keep"))  # none in one of before there was such
    return Slice(batch, *(None if tensor is None else tensor.to(device) for tensor in kept))


def _slices(state: dict[str, Any]) -> dict[tuple[int, int], Slice]:
    read = torch.device("cpu")
    return {(generation, first): slice_of(held, read) for generation, first, held in state["slices"]}


def _begun(states: Sequence[dict[str, Any]], world: World) -> dict[int, Begun]:
    """This rank's part of what was begun on the ranks whose `states` these are."""
    # Every rank has begun the same; a checkpoint of before there was such a thing has none.
    generations = states[0].get("begun", {}) if states else {}
    return {
        generation: begun_of([state["begun"][generation] for state in states], world.rank, world.size)
        for generation in generations
    }


def begun_state(begun: Begun) -> dict[str, Any]:
    """Waits until it is sampled."""
    return {"version": begun.version, "rollouts": [_rollout_state(rollout) for rollout in begun]}


def begun_of(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> Begun:
    """Return the part of a batch that `rank` of `size` has.

    Args:
        states: what `begun_state` gave on each rank that it was saved by, or on this rank alone.
    """
    rollouts = [_rollout(each) for state in states for each in state["rollouts"]]
    return Begun(states[0]["version"], [rollout for rollout in rollouts if rollout.group_id % size == rank])


def _rollout_state(rollout: Rollout) -> dict[str, Any]:
    logprobs, mask = rollout.sampler_logprobs, rollout.model_mask
    return {
        "group_id": rollout.group_id,
        "sample": rollout.sample,
        "prompt_ids": torch.tensor(rollout.prompt_ids, dtype=torch.int64),
        "completion_ids": torch.tensor(rollout.completion_ids, dtype=torch.int64),
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
        "sampler_logprobs": None if logprobs is None else torch.tensor(logprobs, dtype=torch.float64),
        "model_mask": None if mask is None else torch.tensor(mask, dtype=torch.bool),
    }


def _rollout(state: Mapping[str, Any]) -> Rollout:
    plain: dict[str, Any] = {
        name: tuple(value.tolist()) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
    return Rollout(**plain)
