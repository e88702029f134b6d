"""Where a run goes on: the newest good checkpoint of its folder, and whether the run is still the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpox.checkpoint.folders import checkpoints_in, faults, read_manifest
from grpox.checkpoint.progress import SPLITS, Progress, TrainingState, other_batches, plan_of, same_steps
from grpox.checkpoint.rank_state import restore_rank
from grpox.checkpoint.saver import ENGINE
from grpox.checkpoint.shards import read_reference
from grpox.checkpoint.universal import load_of_other_ranks
from grpox.config import RunConfig
from grpox.data.batch_plan import BatchPlan
from grpox.data.schedule import Schedule
from grpox.errors import ConfigError, Problem
from grpox.errors.formatting import counted
from grpox.runfile.lock.differences import Severity, changes, differences
from grpox.runfile.lock.model import Lock
from grpox.runfile.lock.sources import file_hash
from grpox.runtime.logs import get_logger
from grpox.runtime.world import World
from grpox.update.policy_update import PolicyUpdate

logger = get_logger(__name__)
LARGE = 64 * 2**20
"""Of a file with more bytes, size, beginning and end count: hashing all of it could take minutes."""
END = 2**20
"""Bytes of its beginning, and of its end."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are what its manifest says."""

    folder: Path
    progress: Progress

    def restore(self, state: TrainingState, policy: PolicyUpdate, schedule: Schedule, seed: int) -> None:
        """Make a run what it was when this was saved, split as it is now; a collective."""
        engine, world, progress = policy.engine, policy.world, self.progress
        if progress.world_size == world.size:
            engine.load(self.folder, ENGINE, progress.step)
        else:
            if world.is_main:
                before, now = counted(progress.world_size, "rank"), counted(world.size, "rank")
                logger.info("taking %s from %s to %s", self.folder, before, now)
            load_of_other_ranks(engine, self.folder, ENGINE, progress.step)
        read_reference(policy, self.folder, world)
        progress.restore(state)
        restore_rank(state, self.folder, progress, schedule, world, seed)


def newest_good(output_dir: Path, world: World) -> Checkpoint | None:
    """Find the newest checkpoint that is whole; a collective. Rank 0 warns of each damaged one."""
    for folder in world.gather(checkpoints_in(output_dir) if world.is_main else []):
        try:
            manifest, progress = read_manifest(folder), Progress.read(folder)
            # Each rank reads its share of the files.
            names = sorted(manifest)[world.rank :: world.size]
            damage = world.gather(faults(folder, {name: manifest[name] for name in names}))
            if not damage:
                return Checkpoint(folder, progress)
        except ValueError as error:
            damage = world.gather([str(error)] if world.is_main else [])
        if world.is_main:
            logger.warning("the checkpoint %s is damaged and passed over: %s", folder, "; ".join(damage[:3]))
    return None


def no_checkpoint(output_dir: Path) -> ConfigError:
    """Why a run cannot be gone on with of which there is no good checkpoint."""
    what = "holds no checkpoint to go on from" + (" that is whole" if checkpoints_in(output_dir) else "")
    again = f"grpox train {output_dir / 'config.yaml'} --resume auto"
    return ConfigError(Problem(what, "--resume", given=str(output_dir), allowed=f"{again}, which begins anew"))


def check_changes(
    checkpoint: Checkpoint,
    config: RunConfig,
    lock: Lock,
    data: Mapping[str, str],
    world: World,
    allow: bool = False,
) -> None:
    """Whether the run that was saved is the one that is to go on.

    Args:
        data: fingerprints of what the run reads now.
        allow: go on in spite of another config, other data or other code, which are told as warnings.

    Raises:
        ConfigError: with one problem for each difference that matters.
    """
    saved = checkpoint.progress
    before, plan = plan_of(saved.config, saved.world_size), BatchPlan.from_config(config.train, world.size)
    same = same_steps(before, plan)
    problems = [] if same else [other_batches(before, plan)]
    problems += [
        Problem("is not what the checkpoint was made with", found.what, given=found.new, allowed=found.old)
        for found in changes(saved.config, config)
        if found.what not in SPLITS
    ]
    problems += [
        Problem(f"other code than the checkpoint was made with: {found}")
        for found in differences(saved.lock.selected(), lock.selected(), Severity.DRIFT)
    ]
    problems += [
        Problem("holds something else than when the checkpoint was made", key)
        for key, fingerprint in saved.data.items()
        if key in data and data[key] != fingerprint
    ]
    if allow and problems:
        if world.is_main:
            logger.warning("going on in spite of changes:\n%s", "\n".join(f"    {each}" for each in problems))
        problems = []
    cure = "the run as it was saved; --allow-changes goes on all the same" if problems else ""
    if saved.world_size != world.size and config.deepspeed.offload_optimizer == "nvme":
        what = f"the checkpoint is of {saved.world_size} ranks; with offload to nvme it stays so"
        problems.append(Problem(what, given=str(world.size), allowed=str(saved.world_size)))
    if problems:
        raise ConfigError([Problem(f"cannot go on from {checkpoint.folder}", allowed=cure), *problems])


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Key of the run file -> fingerprint of the file or folder it names; what is on the hub is left out."""
    paths = {"model.path": config.model.path, "data.path": config.data.path}
    if config.evaluation is not None:
        paths["evaluation.path"] = config.evaluation.path
    return {key: _fingerprint(Path(path)) for key, path in paths.items() if path and Path(path).exists()}


def _fingerprint(path: Path) -> str:
    if path.is_file():
        return _of_file(path)
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    parts = (f"{file.relative_to(path)} {_of_file(file)}" for file in files)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _of_file(path: Path) -> str:
    size = path.stat().st_size
    if size <= LARGE:
        return file_hash(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(END))
        file.seek(-END, os.SEEK_END)
        digest.update(file.read())
    return f"{size} {digest.hexdigest()}"
