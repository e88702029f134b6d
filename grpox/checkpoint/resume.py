"""Where a run goes on: the newest good checkpoint of its folder, and whether the run is still the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from grpox.checkpoint.folders import checkpoints_in
from grpox.checkpoint.manifest import faults, read_manifest
from grpox.checkpoint.progress import Progress
from grpox.checkpoint.rank_state import restore_rank
from grpox.checkpoint.reference import read_reference
from grpox.checkpoint.same_batches import SPLITS, other_batches, plan_of, same_steps
from grpox.checkpoint.saver import ENGINE
from grpox.checkpoint.training_state import TrainingState
from grpox.checkpoint.universal import load_of_other_ranks
from grpox.config import RunConfig
from grpox.config.evaluation_settings import evaluation_in
from grpox.data.schedule import BatchPlan
from grpox.errors import ConfigError, Problem
from grpox.errors.formatting import counted
from grpox.runfile.lock.differences import Severity, differences
from grpox.runfile.lock.model import Lock
from grpox.runfile.same_run import changes
from grpox.runtime.world import World


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are what its manifest says."""

    folder: Path
    progress: Progress

    def restore(self, trainer: TrainingState) -> None:
        """Make a trainer what it was when this was saved, split as it is now; a collective."""
        engine, world = trainer.policy.engine, trainer.world
        if self.progress.world_size == world.size:
            engine.load(self.folder, ENGINE, self.progress.step)
        else:
            if world.is_main:
                before, now = counted(self.progress.world_size, "rank"), counted(world.size, "rank")
                text = f"taking {self.folder} from {before} to {now}"
                Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
            load_of_other_ranks(engine, self.folder, ENGINE, self.progress.step)
        read_reference(trainer.policy, self.folder, world)
        trainer.num_tokens = self.progress.num_tokens
        if trainer.draws is not None:
            trainer.draws.restore(self.progress.prompts_drawn)
        trainer.before = self.progress.evaluation_before
        trainer.after = evaluation_in(self.progress.metrics)
        if trainer.early_stop is not None:
            trainer.early_stop.restore(self.progress.early_stop)
        trainer.seconds_before = self.progress.seconds
        trainer.policy.nonfinite.skipped = self.progress.skipped_steps
        trainer.policy.nonfinite.in_a_row = self.progress.skipped_in_a_row
        restore_rank(trainer, self.folder, self.progress)


def newest_good(output_dir: Path, world: World, console: Console | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole; a collective. Each damaged one is named, on rank 0.

    Args:
        console: where that is told; default: standard error.
    """
    for folder in world.gather(checkpoints_in(output_dir) if world.is_main else []):
        damage = _damage(folder, world)
        if not damage:
            return Checkpoint(folder, Progress.read(folder))
        if world.is_main:
            text = f"warning: the checkpoint {folder} is damaged and passed over: " + "; ".join(damage[:3])
            told_to = console or Console(stderr=True)
            told_to.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
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
            text = "\n".join(["warning: going on in spite of changes:", *(f"    {each}" for each in problems)])
            Console(stderr=True).print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
        problems = []
    cure = "the run as it was saved; --allow-changes goes on all the same" if problems else ""
    if saved.world_size != world.size and config.deepspeed.offload_optimizer == "nvme":
        what = f"the checkpoint is of {saved.world_size} ranks; with offload to nvme it stays so"
        problems.append(Problem(what, given=str(world.size), allowed=str(saved.world_size)))
    if problems:
        raise ConfigError([Problem(f"cannot go on from {checkpoint.folder}", allowed=cure), *problems])


def _damage(folder: Path, world: World) -> Sequence[str]:
    """What is wrong with a checkpoint; each rank reads its share of the files."""
    try:
        manifest = read_manifest(folder)
        Progress.read(folder)
    except ValueError as error:
        return world.gather([str(error)] if world.is_main else [])
    names = sorted(manifest)[world.rank :: world.size]
    return world.gather(faults(folder, {name: manifest[name] for name in names}))
