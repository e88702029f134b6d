"""From a resolved run file to a finished run: opens its inputs, trains, saves, writes the summary.

`train_run` does it whole. `open_run` stops before the first step: `grpox.Run` takes the steps one by one.
"""

from __future__ import annotations

import grpox.runtime.quick_transformers  # noqa: F401 # isort: skip # before transformers itself

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from grpox.checkpoint.resume import Checkpoint, check_changes, fingerprints, newest_good, no_checkpoint
from grpox.checkpoint.save_model import CARD, check_hub, model_card, push_model, save_model
from grpox.checkpoint.shards import ShardFiles
from grpox.config import RunConfig
from grpox.config.inputs import AUTO
from grpox.config.training import tokens_on
from grpox.contracts import Capability, Generator, RunContext
from grpox.data.schedule import Schedule
from grpox.errors import RunFailed
from grpox.errors.redaction import redacted
from grpox.observing.alarms import FILE as ALARMS
from grpox.observing.alarms import write_alarms
from grpox.observing.machine_metrics import machine_metrics
from grpox.observing.observers import Observers
from grpox.observing.record import STARTED, began, finished, git_commit, recorded_choices, versions
from grpox.policy.adapter_folder import FOLDER as ADAPTER_FOLDER
from grpox.policy.adapter_folder import save_adapter
from grpox.policy.deepspeed_config import check_deepspeed
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.lora.layers import parameter_counts
from grpox.policy.memory_plan.of_run import generator_settings
from grpox.policy.precision import dtype_here, prepare_cuda
from grpox.policy.reference import BaseAsReference
from grpox.policy.rope import rope_choice
from grpox.runfile.checks import divides_steps
from grpox.runfile.load import ResolvedRun
from grpox.runfile.lock.differences import CHAT_DATE, DTYPE, LONGEST, MICRO_BATCH, check_ranks
from grpox.runfile.lock.of_run import lock_of
from grpox.runtime.determinism import check_determinism, prepare_determinism
from grpox.runtime.files import as_strict_json, restrict_umask, write_atomically, write_error_message
from grpox.runtime.foreign_code import FOREIGN, translate_exits
from grpox.runtime.logs import get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.run_lock import hold_on_all_ranks
from grpox.runtime.setup import keep_freed_memory, quieten, seed_libraries
from grpox.runtime.signals import first_signal_waits
from grpox.runtime.watchdog import GRACE, Watchdog, enable_tcp_keepalive
from grpox.runtime.world import World, on_every_rank, start_world, translate_lost_ranks
from grpox.training.build import (
    TrainerParts,
    TrainInputs,
    build_engines,
    build_observers,
    build_trainer,
    unused_modes,
)
from grpox.training.components import RunComponents
from grpox.training.given import make_whole
from grpox.training.inputs import (
    decide_longest,
    generator_context,
    model_config,
    open_generator,
    open_model,
    open_tokenizer,
    provides,
    start_sampler,
)
from grpox.training.trainer import Trainer
from grpox.training.user_code import open_user_code

logger = get_logger(__name__)
FINISHING = "the steps are done: saving the model first; once more to end at once"


def train_run(
    run: ResolvedRun,
    resume: bool = False,
    allow_changes: bool = False,
    needs_checkpoint: bool = False,
    started: float | None = None,
) -> dict[str, Any]:
    """Train a resolved run to its end; a collective of all ranks. Returns the content of ``summary.json``.

    The arguments are those of `open_run`.
    """
    with open_run(run, resume, allow_changes, needs_checkpoint, started) as opened:
        return opened.train() if isinstance(opened, OpenRun) else opened


@dataclass
class OpenRun:
    """A run whose parts are there: `trainer` takes steps, `train` takes what remains and saves the model."""

    parts: TrainerParts
    trainer: Trainer
    engine: Engine
    reference: FrozenEngine | BaseAsReference | None
    model: PreTrainedModel
    device: torch.device
    """Place of the model before it was sharded."""
    generation_config: GenerationConfig | None
    watchdog: Watchdog
    generating: ExitStack
    """Closes the generator, at the latest when the run ends."""
    summary: dict[str, Any]
    """Filled at the end."""

    @translate_exits(FOREIGN)
    def train(self) -> dict[str, Any]:
        """Take the remaining steps, save the model and write ``summary.json``; return its content.

        A signal that arrives during the last step or later is raised once the run is complete.
        """
        self.trainer.start()
        with first_signal_waits(FINISHING if self.parts.world.is_main else ""):
            return self._train()

    def _train(self) -> dict[str, Any]:
        parts, trainer, summary = self.parts, self.trainer, self.summary
        config, context = parts.run.config, parts.context
        summary |= trainer.run() | trainer.checkpoints.summary()
        if slower := unused_modes(self.engine, self.reference):
            summary["unused_forward_modes"] = slower
        self.generating.close()
        with parts.times.phase("save"):
            summary |= _save_model(parts, self.engine, self.model.name_or_path, self.generation_config)
        self.release_model()
        if parts.world.is_main:
            folder, path = Path(summary["model"]), context.output_dir / "summary.json"
            with suppress(OSError):  # on a full disk, only the card is lost
                card = model_card(config, summary, context.fingerprints, trainer.state.metrics)
                write_atomically(folder / CARD, card)
            try:
                if summary.get("alarms") or (path.parent / ALARMS).exists():
                    write_alarms(path.parent, summary.get("alarms", []))
                write_atomically(path, as_strict_json(summary) + "\n")
            except OSError as error:
                raise RunFailed(write_error_message(error, path)) from error
            parts.observers.checkpoint_saved(context, self.engine.steps, folder)
        return summary

    def release_model(self) -> None:
        """Give a model from Python its whole weights back; no step can be taken afterwards; a collective."""
        self.generating.close()
        if self.parts.run.given.model is not None:
            make_whole(self.model, self.engine, self.device)


@contextmanager
def open_run(
    run: ResolvedRun,
    resume: bool = False,
    allow_changes: bool = False,
    needs_checkpoint: bool = False,
    started: float | None = None,
) -> Iterator[OpenRun | dict[str, Any]]:
    """Open a resolved run, which lasts as long as the block; a collective of all ranks.

    An error in the block, or a block that ends before `OpenRun.train` has returned, fails the run: observers
    are told.

    Args:
        resume: continue from the newest good checkpoint in the run's folder; without one the run starts over.
        allow_changes: continue even if config, data or plugins differ from the checkpoint's.
        needs_checkpoint: refuse to start over.
        started: Unix time at which the command began; default: now.

    Yields:
        the run before its first step; of a run that is complete already, its summary.
    """
    started = started or time.time()
    config = run.config
    quieten()
    restrict_umask()
    if config.train.deterministic:
        prepare_determinism()
    # Longer than any rank may stall, so that a stalled rank reports it before the others give up.
    world = start_world(config.watchdog.end_after + 2 * GRACE)
    if world.device.type == "cpu":
        keep_freed_memory()
    enable_tcp_keepalive(config.watchdog.host_lost_after)
    with (
        hold_on_all_ranks(Path(config.output_dir), world),
        open_user_code(run) as code,
        translate_exits(FOREIGN),
    ):
        recorded = _decide_automatic(run, world, resume)
        day = recorded.get(
            CHAT_DATE, recorded.get(STARTED)
        )  # the second: recorded without a date, by an old run
        tokenizer = open_tokenizer(run, world, (*code.rewards, *code.of_evaluation), day)
        lock = lock_of(run)
        check_ranks(world, lock, redacted(config.model_dump(mode="json")))
        check_deepspeed(config)
        _check_determinism(run, world)
        if config.hub is not None and world.is_main:
            check_hub(config.hub)
        seed_libraries(config.train.seed)
        _tell(world, "reading the data: %s", config.data.path or "the dataset's rows")
        times = PhaseTimes(generator=generator_settings(run))
        components = RunComponents(run, lock, world, times)
        inputs = TrainInputs.open(run, world, components, code, tokenizer)
        if resume and (done := finished(config, inputs.schedule.total_steps)):
            _say_complete(config, done, world)
            yield done
            return
        generator = open_generator(run, world)
        components.add("generator", generator)
        data = fingerprints(config) | dict(run.given.fingerprints)
        checkpoint = newest_good(Path(config.output_dir), world) if resume else None
        if checkpoint is not None:
            check_changes(checkpoint, config, lock, data, world, allow_changes)
        elif needs_checkpoint:
            raise no_checkpoint(Path(config.output_dir))
        context = _context(run, world, inputs.schedule, resume, checkpoint, data, started)
        observers = build_observers(run, world, components, lock)
        if config.tracking:
            _tell(world, "starting to track: %s", ", ".join(config.tracking))
        with (
            Watchdog(config.watchdog, times, context.output_dir / "stalls", world.rank) as watchdog,
            _observed(context, observers, world) as summary,
            translate_lost_ranks(world, times),
            machine_metrics(context.output_dir, config.logging.system_metrics_every, world),
        ):
            parts = TrainerParts(run, world, inputs, components, context, observers, lock, times)
            with _opened(parts, generator, checkpoint, allow_changes, watchdog, summary) as opened:
                yield opened
        if world.is_main:
            _push(config, summary)  # last, so that a failed push loses nothing


def _tell(world: World, message: str, *values: object) -> None:
    """Name the phase that begins, once, because loading may take minutes without another sign of life."""
    if world.is_main:
        logger.info(message, *values)


def _say_complete(config: RunConfig, summary: Mapping[str, Any], world: World) -> None:
    if world.is_main:
        early = ", where it stopped early" if "stopped_early" in summary else ""
        logger.info("%s: the run is complete, %s steps%s", config.output_dir, summary["steps"], early)


def _check_determinism(run: ResolvedRun, world: World) -> None:
    if run.config.train.deterministic:
        name, has_own = run.components["generator"].label, provides(run, Capability.OTHER_NUMERICS)
        check_determinism(name, has_own, world.device)


def _push(config: RunConfig, summary: dict[str, Any]) -> None:
    if config.hub is not None:
        address = push_model(Path(summary["model"]), config, config.hub, summary)
        logger.info("pushed to %s", address)


def _decide_automatic(run: ResolvedRun, world: World, resume: bool) -> Mapping[str, Any]:
    """Replace ``auto`` by the precision, lengths and size of micro-batches that the run has; a collective.

    A resumed run keeps those that it began with, also on other devices. They are returned.
    """
    model, train = run.config.model, run.config.train
    reads = resume and world.is_main
    [recorded, *_] = world.gather([recorded_choices(Path(run.config.output_dir)) if reads else {}])
    if model.dtype == AUTO:
        model.dtype = recorded.get(DTYPE, dtype_here(model))
    if model.longest_sequence == AUTO:
        model.longest_sequence = recorded.get(LONGEST, AUTO)
    if longest := decide_longest(run):
        choice = rope_choice(model_config(run), longest)
        _tell(world, "position factors of the model: %s, for up to %s tokens", choice, longest)
    if train.max_tokens_per_micro_batch == AUTO:
        on_gpu = tokens_on(AUTO, world.device.type == "cuda", divides_steps(run.components["loss"]))
        train.max_tokens_per_micro_batch = recorded.get(MICRO_BATCH, on_gpu)
    return recorded


@contextmanager
def _observed(context: RunContext, observers: Observers, world: World) -> Iterator[dict[str, Any]]:
    """Tell the observers on rank 0 how the run begins and ends, with the summary that the block fills."""
    summary: dict[str, Any] = {}
    try:
        if world.is_main:
            observers.run_started(context)
        yield summary
    except BaseException as error:
        if world.is_main:
            observers.run_failed(context, error)
        raise
    if world.is_main:
        observers.run_finished(context, summary)


@contextmanager
def _opened(
    parts: TrainerParts,
    generator: Generator,
    checkpoint: Checkpoint | None,
    allow_changes: bool,
    watchdog: Watchdog,
    summary: dict[str, Any],
) -> Iterator[OpenRun]:
    """Load the model, start the generator, and restore the checkpoint; the generator ends with the block."""
    config, world, times = parts.run.config, parts.world, parts.times
    with translate_exits(FOREIGN):
        _tell(world, "loading the model: %s", config.model.path)
        model = on_every_rank(world, times, times.phase("load")(lambda: open_model(parts.run)))
        prepare_cuda(model, world.device)
        device, generation_config = model.device, model.generation_config
        for_generator = generator_context(model, parts.inputs.tokenizer, config, world)
        files = ShardFiles(config.checkpoint.background)
        _tell(world, "setting up DeepSpeed, then the generator %s", parts.run.components["generator"].label)
        with times.phase("shard"):
            engine, reference = build_engines(parts, model, files)
        episodes = parts.inputs.episodes
        loop = None if episodes is None else episodes.loop(world, times, for_generator.stop_token_ids)
        sampler = start_sampler(generator, for_generator, engine, world, times, episodes=loop)
        with ExitStack() as generating:
            generating.callback(times.phase("close")(generator.close))
            trainer = build_trainer(parts, engine, reference, sampler, files)
            if checkpoint is not None:
                with times.phase("restore"):
                    checkpoint.restore(
                        trainer.state,
                        trainer.policy,
                        parts.components.states,
                        trainer.schedule,
                        config.train.seed,
                        allow_changes,
                    )
                    trainer.steering.restore()
            parts.components.start()
            enable_tcp_keepalive(config.watchdog.host_lost_after)  # connections of engine and generator too
            times.take()  # none of this is the first step's
            yield OpenRun(
                parts,
                trainer,
                engine,
                reference,
                model,
                device,
                generation_config,
                watchdog,
                generating,
                summary,
            )


def _save_model(
    parts: TrainerParts, engine: Engine, base: str, generation_config: GenerationConfig | None
) -> dict[str, Any]:
    """Save the trained model and its adapters, and return their part of the summary; a collective."""
    context, config, world = parts.context, parts.run.config, parts.world
    trained, total = parameter_counts(engine.module)
    saved: dict[str, Any] = {"trained_parameters": trained, "parameters": total}
    folder = context.output_dir / "model"
    save_model(engine, parts.inputs.tokenizer, generation_config, folder, world)
    if config.model.lora is not None:
        adapter = context.output_dir / ADAPTER_FOLDER
        save_adapter(engine, base, adapter, world)
        saved["adapter"] = str(adapter)
    return saved | {"model": str(folder), "output_dir": str(context.output_dir), "source": parts.run.source}


def _context(
    run: ResolvedRun,
    world: World,
    schedule: Schedule,
    resume: bool,
    checkpoint: Checkpoint | None,
    data: Mapping[str, str],
    started: float,
) -> RunContext:
    progress = checkpoint.progress if checkpoint else None
    done = progress.step if progress else 0 if resume and began(run.config) else None
    return RunContext(
        config=run.config,
        output_dir=Path(run.config.output_dir),
        total_steps=schedule.total_steps,
        world_size=world.size,
        versions=versions([*run.distributions, *(["peft"] if run.config.model.lora else [])]),
        git_commit=git_commit(),
        source=run.source,
        resumed_at=done,
        metrics_bytes=progress.metrics_bytes if progress else 0,
        generations_before=schedule.generations_until(progress.step) if progress else 0,
        fingerprints=data,
        started=started,
    )
