"""Saves checkpoints: each is written under a temporary name, hashed, then renamed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpox.checkpoint.components import FILE as COMPONENTS
from grpox.checkpoint.components import RunComponents
from grpox.checkpoint.folders import (
    checkpoints_in,
    clear_unfinished,
    folder_of,
    publish,
    rank_file,
    step_of,
    unfinished_of,
    write_manifest,
)
from grpox.checkpoint.progress import Progress, TrainingState, saved_fields
from grpox.checkpoint.rank_state import rank_state
from grpox.checkpoint.shards import ShardFiles, write_reference
from grpox.config import CheckpointConfig
from grpox.contracts import RunContext
from grpox.errors.redaction import redacted
from grpox.observing.observers import Observers
from grpox.observing.record import sync_record
from grpox.runfile.lock.model import Lock
from grpox.runtime.files import write_error_message
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.update.policy_update import PolicyUpdate

ENGINE = "engine"
"""Folder of DeepSpeed's files."""


@dataclass
class CheckpointSaver:
    """Saves a checkpoint when one is due. All its methods are collectives.

    A checkpoint that cannot be written is a warning: the run goes on, and the last good one stays.
    """

    config: CheckpointConfig
    context: RunContext
    world: World
    lock: Lock
    observers: Observers
    shards: ShardFiles
    policy: PolicyUpdate
    """Holds the engine and the reference."""
    components: RunComponents
    times: PhaseTimes
    warn: WarnOnce = field(default_factory=lambda: WarnOnce(get_logger(__name__)))
    _pending: bool = False
    """True while a thread writes the last checkpoint."""
    _saved: int = -1
    """The step of the last checkpoint, saved or begun; -1 if it failed, so that it may be saved again."""

    def after_step(self, state: TrainingState, step: int, last: bool) -> None:
        """Complete a checkpoint that the thread has written; save one if due, as after the `last` step."""
        if self._pending and all(self.world.gather([self.shards.done])):
            self.finish()
        every = self.config.every
        if (every > 0 and step % every == 0) or (self.config.saves_last and last):
            self.save(state, step)

    def save(self, state: TrainingState, step: int, wait: bool = False) -> None:
        """Save the checkpoint after `step` steps unless it exists.

        Args:
            wait: wait for a writing thread too.
        """
        self.finish()
        if step != self._saved:
            self._begin(state, step)
        if wait or not self.config.background:
            self.finish()

    def finish(self) -> None:
        """Wait for the thread that writes a checkpoint, if any, and give the checkpoint its name."""
        if not self._pending:
            return
        self._pending = False
        step, folder = self._saved, folder_of(self.context.output_dir, self._saved)
        if self._fails(self.shards.finished()):
            return
        unfinished, written = unfinished_of(folder), self.shards.written.items()
        own = [(path.relative_to(unfinished).as_posix(), facts) for path, facts in written]
        known = dict(self.world.gather(own))

        def complete() -> None:
            write_manifest(unfinished, known)
            publish(folder)
            self._prune(step)
            self.observers.checkpoint_saved(self.context, step, folder)

        self._fails_on_main(complete)

    def summary(self) -> dict[str, Any]:
        """Describe the best checkpoint for the summary of a finished run; empty without one."""
        best = best_of(checkpoints_in(self.context.output_dir), self.config) if self.world.is_main else None
        [best, *_] = self.world.gather([best])
        return {"best_checkpoint": best} if best else {}

    def _begin(self, state: TrainingState, step: int) -> None:
        output_dir, before, self._saved = self.context.output_dir, self._saved, step
        folder = unfinished_of(folder_of(output_dir, step))
        components = self.components.saved()

        def begin() -> None:
            clear_unfinished(output_dir)
            folder.mkdir(parents=True)
            progress = Progress(
                step=step,
                world_size=self.world.size,
                metrics_bytes=sync_record(output_dir, before),
                config=redacted(self.context.config.model_dump(mode="json")),
                data=dict(self.context.fingerprints),
                lock=self.lock,
                **saved_fields(state),
            )
            progress.write(folder)

        if self._fails_on_main(begin):
            return
        with self.times.phase("checkpoint"):
            self.policy.engine.save(folder, ENGINE)
            self.shards.submit(rank_state(state, self.world, self.times), rank_file(folder, self.world.rank))
            if self.world.is_main:
                self.shards.submit(components, folder / COMPONENTS)
            write_reference(self.policy, folder, self.shards, self.world)
        self._pending = True

    def _fails_on_main(self, work: Callable[[], None]) -> bool:
        try:
            if self.world.is_main:
                work()
        except OSError as error:
            return self._fails([error])
        return self._fails([])

    def _fails(self, errors: Sequence[OSError]) -> bool:
        """Return True if any rank has errors; then warn and remove the unfinished checkpoint; a collective."""
        failures = self.world.gather(
            [
                write_error_message(each, Path(each.filename)) if each.filename else each.strerror or str(each)
                for each in errors
            ]
        )
        if failures and self.world.is_main:
            what = f"the checkpoint after step {self._saved} could not be saved: {'; '.join(failures)}"
            self.warn("checkpoint", f"{what}\n    the run goes on; checkpoints that were there are still there")
            unfinished = unfinished_of(folder_of(self.context.output_dir, self._saved))
            shutil.rmtree(unfinished, ignore_errors=True)
        if failures:
            self._saved = -1
        return bool(failures)

    def _prune(self, step: int) -> None:
        """Remove all but the newest and the best.

        Checkpoints after `step` do not count: the run went back, perhaps because they are damaged.
        """
        folders = [folder for folder in checkpoints_in(self.context.output_dir) if step_of(folder) <= step]
        best = best_of(folders, self.config) or {}
        for folder in folders[self.config.keep :]:
            if str(folder) != best.get("checkpoint"):
                shutil.rmtree(folder)


def best_of(folders: Sequence[Path], config: CheckpointConfig) -> dict[str, Any] | None:
    """Describe the best of the checkpoints in `folders`, newest first; of equal ones the newest.

    A checkpoint has the metrics of its step and of the evaluation after it. Without the metric, or with NaN, it
    is never the best.
    """
    if config.best is None:
        return None
    rated: list[dict[str, Any]] = [
        {"metric": config.best, "value": value, "step": progress.step, "checkpoint": str(folder)}
        for folder, progress in ((folder, Progress.read(folder)) for folder in folders)
        if not math.isnan(value := progress.metrics.get(config.best, math.nan))
    ]
    sign = 1 if config.best_is in ("highest", "max") else -1
    return max(rated, key=lambda best: sign * best["value"], default=None)
