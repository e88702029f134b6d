"""Resuming a run: finds the newest good checkpoint of its folder, and checks that the run is still the same.

Another number of ranks needs DeepSpeed's universal checkpoint, with each parameter in a file. DeepSpeed 0.19
loads it with errors that are corrected here: every group of parameters gets the settings of the first (weight
decay on biases and norms), all share one counter of steps, which each of them advances, and buffers are not
restored.
"""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import shutil
from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpox.checkpoint.components import FILE as COMPONENTS
from grpox.checkpoint.components import RunComponents
from grpox.checkpoint.folders import checkpoints_in, faults, rank_file, read_manifest
from grpox.checkpoint.progress import (
    PROGRESS,
    SPLITS,
    Progress,
    TrainingState,
    other_batches,
    plan_of,
    same_steps,
)
from grpox.checkpoint.rank_state import reading, restore_rank
from grpox.checkpoint.saver import ENGINE
from grpox.checkpoint.shards import REFERENCE, only_weights, read_reference
from grpox.config import RunConfig
from grpox.data.schedule import BatchPlan, Schedule
from grpox.errors import ConfigError, Problem, RunFailed, describe, text_of
from grpox.errors.formatting import pluralize
from grpox.policy.engine import Engine
from grpox.policy.weight_stream import persistent_buffers
from grpox.runfile.lock.differences import Severity, changes, compare
from grpox.runfile.lock.model import Lock
from grpox.runfile.lock.of_run import file_hash
from grpox.runfile.objects import MERGED
from grpox.runtime.logs import get_logger
from grpox.runtime.world import World
from grpox.update.policy_update import PolicyUpdate

logger = get_logger(__name__)
LARGE = 64 * 2**20
"""Bytes above which only size, beginning and end are hashed: the whole file could take minutes."""
END = 2**20
"""Bytes of beginning and end."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match its manifest."""

    folder: Path
    progress: Progress

    def restore(
        self,
        state: TrainingState,
        policy: PolicyUpdate,
        components: RunComponents,
        schedule: Schedule,
        seed: int,
        allow: bool = False,
    ) -> None:
        """Restore a run, split over its present ranks; a collective.

        Args:
            allow: go on even if states and components do not belong together.

        Raises:
            ConfigError: a component's state cannot be restored.
        """
        engine, world, progress = policy.engine, policy.world, self.progress
        with reading(self.folder / ENGINE):
            if progress.world_size == world.size:
                engine.load(self.folder, ENGINE, progress.step)
            else:
                if world.is_main:
                    before, now = pluralize(progress.world_size, "rank"), pluralize(world.size, "rank")
                    logger.info("taking %s from %s to %s", self.folder, before, now)
                load_of_other_ranks(engine, self.folder, ENGINE, progress.step)
        with reading(self.folder / REFERENCE):
            read_reference(policy, self.folder, world)
        with reading(self.folder / PROGRESS):
            progress.restore(state)
        with reading(self.folder / COMPONENTS):
            components.restore(self.folder, allow)
        with reading(rank_file(self.folder, world.rank)):
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
    """Build the error of a run without a good checkpoint."""
    what = "holds no checkpoint to go on from" + (" that is whole" if checkpoints_in(output_dir) else "")
    # The config names another folder if this one has been moved.
    config, own = f"{output_dir}/config.yaml", f"output_dir={output_dir}"
    again = shlex.join(["grpox", "train", config, "--resume", "auto", own])
    return ConfigError(what, "--resume", given=str(output_dir), allowed=f"{again}, which begins anew")


def check_changes(
    checkpoint: Checkpoint,
    config: RunConfig,
    lock: Lock,
    data: Mapping[str, str],
    world: World,
    allow: bool = False,
) -> None:
    """Check that the saved run is the one to continue.

    Args:
        data: present fingerprints of the run's inputs.
        allow: continue with another config, other data or other code, with a warning.

    Raises:
        ConfigError: one problem for each difference that matters.
    """
    saved = checkpoint.progress
    before, plan = plan_of(saved.config, saved.world_size), BatchPlan.from_config(config.train, world.size)
    problems = [] if same_steps(before, plan) else [other_batches(before, plan)]
    problems += [
        Problem("is not what the checkpoint was made with", change.what, given=change.new, allowed=change.old)
        for change in changes(saved.config, config)
        if change.what not in SPLITS
    ]
    problems += [
        Problem(f"other code than the checkpoint was made with: {difference}")
        for difference in compare(saved.lock.selected(), lock.selected())
        if difference.severity is Severity.DRIFT
    ]
    problems += [
        Problem("holds something else than when the checkpoint was made", key)
        for key in dict.fromkeys((*saved.data, MERGED))
        if (key in data or key == MERGED) and data.get(key) != saved.data.get(key)
    ]
    if allow and problems:
        if world.is_main:
            logger.warning("going on in spite of changes:\n%s", "\n".join(f"    {each}" for each in problems))
        problems = []
    cure = "the run as it was saved"
    if saved.world_size == world.size or config.deepspeed.offload_optimizer != "nvme":
        cure += "; `grpox train` with --allow-changes goes on all the same"
    else:
        what = f"the checkpoint is of {saved.world_size} ranks; with offload to nvme it stays so"
        problems.append(Problem(what, given=str(world.size), allowed=str(saved.world_size)))
    if problems:
        raise ConfigError([Problem(f"cannot go on from {checkpoint.folder}", allowed=cure), *problems])


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Return key of the run file -> fingerprint of the file or folder it names; hub ids are left out."""
    paths: dict[str, str | None] = {"model.path": config.model.path, "data.path": config.data.path}
    if config.evaluation is not None:
        paths |= config.evaluation.set_paths
    return {key: _fingerprint(Path(path)) for key, path in paths.items() if path and Path(path).exists()}


def _fingerprint(path: Path) -> str:
    if not path.is_file():
        files = (file for file in sorted(path.rglob("*")) if file.is_file())
        parts = (f"{file.relative_to(path)} {_fingerprint(file)}" for file in files)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    size = path.stat().st_size
    if size <= LARGE:
        return file_hash(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(END))
        file.seek(-END, os.SEEK_END)
        digest.update(file.read())
    return f"{size} {digest.hexdigest()}"


def load_of_other_ranks(engine: Engine, folder: Path, name: str, steps: int) -> None:
    """Load the result of `Engine.save` after `steps` steps on another number of ranks; a collective.

    The disk needs room for two more copies: rank 0 converts DeepSpeed's files beside the checkpoint, and then
    removes them.
    """
    from deepspeed.utils import zero_to_fp32

    world = engine.world
    # `clear_unfinished` removes this name too, if the run is killed meanwhile.
    converted = folder.with_name(f".{folder.name}.universal.unfinished")
    failure = _convert(folder / name, converted) if world.is_main else ""
    try:
        if failures := "".join(world.gather([failure])):
            raise RunFailed(f"{folder} cannot be taken to another number of ranks: {failures}")
        engine.deepspeed._config.load_universal_checkpoint = True
        with only_weights():
            loaded, _ = engine.deepspeed.load_checkpoint(str(converted), tag=name)
            # The state that belongs to no single parameter.
            path = converted / name / "zero" / "optimizer_state.pt"
            saved = torch.load(path, map_location="cpu", weights_only=True)
        if loaded is None:
            raise RunFailed(f"DeepSpeed finds no checkpoint in {converted / name}")
        _mend(engine.deepspeed.optimizer, saved["param_groups"])
    finally:
        engine.deepspeed._config.load_universal_checkpoint = False
        world.barrier()
        if world.is_main:
            shutil.rmtree(converted, ignore_errors=True)
    with only_weights(), torch.no_grad():
        file = zero_to_fp32.get_model_state_file(str(folder / name), zero_stage=3)
        state = torch.load(file, map_location="cpu", weights_only=True)["module"]  # with rank 0's buffers
        for buffer_name, buffer in persistent_buffers(engine.module):
            buffer.copy_(state[buffer_name])
    engine.steps = steps


def _mend(sharded: Any, saved: list[dict[str, Any]]) -> None:
    """Give each group its own settings, and each shard its own counter on the device that AdamW needs."""
    optimizer = sharded.optimizer
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})
    for place, shard in enumerate(sharded.fp32_partitioned_groups_flat):
        group, state = optimizer.param_groups[sharded.sub_group_to_group_id[place]], optimizer.state[shard]
        on_device = group.get("fused") or group.get("capturable")
        if torch.is_tensor(state["step"]):
            state["step"] = state["step"].to(shard.device if on_device else "cpu", copy=True)


def _convert(source: Path, folder: Path) -> str:
    """Convert DeepSpeed's files to a universal checkpoint; return the error, or an empty text."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(folder, ignore_errors=True)
    arguments = Namespace(
        input_folder=str(source),
        output_folder=str(folder / source.name),
        # In this process, where `only_weights` applies.
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
    except Exception as error:  # noqa: BLE001 - the other ranks wait for any error
        return describe(error)
    return ""
