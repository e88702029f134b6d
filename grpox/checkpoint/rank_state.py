"""Each rank's own part of a checkpoint: samples in use, prefetched batches, random numbers.

It has plain values and tensors only, which ``weights_only=True`` can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpox.checkpoint.folders import rank_file
from grpox.checkpoint.progress import Progress, TrainingState, plan_of, same_steps
from grpox.checkpoint.rng import fresh_random_state, random_state, set_random_state
from grpox.contracts import Episode, Rollout, ToolCall, ToolResult, Turn
from grpox.data.schedule import Schedule
from grpox.errors import ConfigError, GrpoxError, describe
from grpox.policy.batch import Sample, TokenRecord
from grpox.rollout.sampler import PrefetchedBatch
from grpox.runtime.files import sync
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World, on_every_rank

Key = tuple[int, int]
"""Generation and row of a sample."""
_DTYPES = {
    "prompt_ids": torch.int64,
    "completion_ids": torch.int64,
    "sampler_logprobs": torch.float64,
    "model_mask": torch.bool,
}
"""Fields of a rollout that are saved as tensors."""
_FLAT = {
    "prompts": ("prompt", np.int64),
    "completions": ("completion", np.int64),
    "token_mask": ("token_mask", np.bool_),
    "sampler_logprobs": ("sampler_logprobs", np.float32),
}
"""Key of a state of samples -> their field, and its type in one tensor of all."""
_COMPUTED = {"old": "old_logprobs", "reference": "reference_logprobs", "policy_keep": "policy_keep"}
"""Key of a state of samples -> their field, which some lack."""
CARRIED = ("rewards", "group_id", "sequence_id", "columns")
"""Fields of samples that only some losses need."""


def rank_state(state: TrainingState, world: World, times: PhaseTimes) -> dict[str, Any]:
    """Return the state of this rank between two steps, after waiting for prefetched batches; a collective."""
    batches = state.prefetched.items()
    waited = on_every_rank(world, times, lambda: {number: prefetched_state(batch) for number, batch in batches})
    samples = samples_state(list(state.samples.values()))
    return {"keys": list(state.samples), "samples": samples, "prefetched": waited, "random": random_state()}


def restore_rank(
    state: TrainingState, folder: Path, progress: Progress, schedule: Schedule, world: World, seed: int
) -> None:
    """Restore this rank; last of all, because building anything may draw random numbers.

    If the run splits its batches in another way now, each rank takes the rows that are its own now. If the
    batches themselves are others, they are dropped.
    """
    saved = plan_of(progress.config, progress.world_size)
    ranks = [world.rank] if saved == schedule.plan else range(progress.world_size)
    states = {rank: read_state(rank_file(folder, rank)) for rank in ranks}
    used = list(states.values()) if same_steps(saved, schedule.plan) else []
    samples: dict[Key, Sample] = {}
    for each in used:
        keys = (tuple(key) for key in each["keys"])
        samples |= zip(keys, samples_of_state(each["samples"], world.device), strict=True)
    state.samples = {
        (generation, row): samples[generation, row]
        for generation in sorted({generation for generation, _ in samples})
        for micro_batch in schedule.slices_of(generation)
        for row in micro_batch.rank_rows(world.rank)
    }
    # Every rank has prefetched the same generation batches.
    state.prefetched = {
        generation: prefetched_of([each["prefetched"][generation] for each in used], world.rank, world.size)
        for generation in (used[0]["prefetched"] if used else ())
    }
    mine = states.get(world.rank)
    set_random_state(mine["random"] if mine else fresh_random_state(seed, world.rank, progress.step))


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write the state of a rank and flush it to disk."""
    torch.save(state, path)
    sync(path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what malformed content of a file raises in this block into ConfigError with the file."""
    try:
        yield
    except (GrpoxError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"cannot be read: {describe(error)}", where=str(path)) from error


def read_state(path: Path) -> dict[str, Any]:
    """Read the file that `write_state` wrote."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def samples_state(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return samples as flat tensors, one after the other, with their lengths."""
    state: dict[str, Any] = {
        "prompt_lengths": [len(sample.prompt) for sample in samples],
        "completion_lengths": [len(sample.completion) for sample in samples],
        "reward": [sample.reward for sample in samples],
        "observed": [sample.observed for sample in samples],
        "carried": {},
        "token_records": {
            place: {**vars(record), "turns": torch.from_numpy(record.turns)}
            for place, record in enumerate(sample.token_record for sample in samples)
            if record
        },
    }
    for key, (field, dtype) in _FLAT.items():
        rows: list[np.ndarray[Any, Any]] = [np.asarray(getattr(sample, field), dtype) for sample in samples]
        state[key] = torch.from_numpy(np.concatenate([np.zeros(0, dtype), *rows]))
    for key, field in _COMPUTED.items():
        computed = [getattr(sample, field) for sample in samples]
        known = [row for row in computed if row is not None]
        state[key] = [row is not None for row in computed], torch.cat(known).cpu() if known else None
    advantages = (sample.advantage for sample in samples)
    # Arrays in a form that ``weights_only=True`` can read.
    state["advantages"] = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in advantages]
    for name in CARRIED:
        column = [getattr(sample, name) for sample in samples]
        if any(each is not None for each in column):
            state["carried"][name] = [v.tolist() if isinstance(v, np.ndarray) else v for v in column]
    return state


def samples_of_state(state: Mapping[str, Any], device: torch.device) -> list[Sample]:
    """Rebuild the samples of a `samples_state`, computed log-probabilities on `device`."""
    lengths, columns = state["completion_lengths"], dict[str, Any]()
    for name, field in _COMPUTED.items():
        known, flat = state[name]
        rows = iter(() if flat is None else torch.split(flat.to(device), list(compress(lengths, known))))
        columns[field] = [next(rows) if is_known else None for is_known in known]
    for name, (field, _) in _FLAT.items():
        parts = torch.split(state[name], state["prompt_lengths"] if field == "prompt" else lengths)
        is_ids = field in ("prompt", "completion")
        columns[field] = [tuple(each.tolist()) if is_ids else each.numpy() for each in parts]
    columns["advantage"] = [each.numpy() if isinstance(each, Tensor) else each for each in state["advantages"]]
    columns["reward"] = state["reward"]
    # A checkpoint of an earlier grpox has none of these.
    columns |= state.get("carried", {})
    columns["observed"] = state.get("observed", [0] * len(lengths))
    if "rewards" in columns:
        columns["rewards"] = [None if v is None else np.asarray(v, np.float32) for v in columns["rewards"]]
    samples = [Sample(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    for place, record in state.get("token_records", {}).items():
        samples[place].token_record = TokenRecord(**{**record, "turns": record["turns"].numpy()})
    return samples


def prefetched_state(batch: PrefetchedBatch) -> dict[str, Any]:
    """Return a prefetched batch as plain values, once it is sampled."""
    return {
        "version": batch.version,
        "rollouts": [{name: _saved(name, value) for name, value in vars(rollout).items()} for rollout in batch],
    }


def prefetched_of(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> PrefetchedBatch:
    """Return the part of a batch that `rank` of `size` has; the states are those of the ranks that saved it."""
    rollouts = [_rollout(each) for state in states for each in state["rollouts"]]
    mine = [rollout for rollout in rollouts if rollout.group_id % size == rank]
    return PrefetchedBatch(states[0]["version"], iter(mine))


def _saved(name: str, value: Any) -> Any:
    """Return a field of a rollout as plain values and tensors."""
    if name == "turns":
        return [vars(turn) for turn in value]
    if name == "episode":
        return value and {**vars(value), "results": [asdict(result) for result in value.results]}
    return value if value is None or name not in _DTYPES else torch.tensor(value, dtype=_DTYPES[name])


def _rollout(state: Mapping[str, Any]) -> Rollout:
    plain: dict[str, Any] = {
        name: tuple(value.tolist()) if isinstance(value, Tensor) else value for name, value in state.items()
    }
    if "turns" in plain:  # a checkpoint of an earlier grpox has none
        plain["turns"] = tuple(Turn(**turn) for turn in plain["turns"])
    if episode := plain.get("episode"):
        calls = [{**each, "call": ToolCall(**each["call"])} for each in episode["results"]]
        plain["episode"] = Episode(**{**episode, "results": tuple(ToolResult(**each) for each in calls)})
    return Rollout(**plain)
