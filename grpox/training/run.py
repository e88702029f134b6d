"""A run from its resolved run file to its end: opens the inputs, trains, saves, writes the summary.

`train_run` does all of it. `open_run` stops before the first step: `grpox.Run` takes the steps one by one.
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
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from grpox.checkpoint.components import RunComponents
from grpox.checkpoint.resume import Checkpoint, check_changes, fingerprints, newest_good, no_checkpoint
from grpox.checkpoint.save_model import CARD, check_hub, model_card, push_model, save_model
from grpox.checkpoint.shards import ShardFiles
from grpox.config.inputs import AUTO
from grpox.config.training import tokens_on
from grpox.contracts import Capability, Generator, RunContext
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
from grpox.policy.engine import Engine
from grpox.policy.lora.layers import adapted_layers, merge_adapters, parameter_counts
from grpox.policy.precision import dtype_here
from grpox.policy.rope import rope_choice
from grpox.policy.weight_stream import stream_parameters
from grpox.rollout.rewards.isolation import OF_EVALUATION, OF_TRAINING
from grpox.runfile.checks import divides_steps
from grpox.runfile.load import ResolvedRun
from grpox.runfile.lock.differences import CHAT_DATE, DTYPE, LONGEST, MICRO_BATCH, check_ranks
from grpox.runfile.lock.of_run import lock_of
from grpox.runtime.determinism import check_determinism, prepare_determinism
from grpox.runtime.files import as_strict_json, restrict_umask, write_atomically, write_error_message
from grpox.runtime.foreign_code import FOREIGN, translate_exits
from grpox.runtime.logs import get_logger
from grpox.runtime.run_lock import hold_on_all_ranks
from grpox.runtime.setup import keep_freed_memory, quieten, seed_libraries
from grpox.runtime.signals import first_signal_waits
from grpox.runtime.watchdog import GRACE, Watchdog, enable_tcp_keepalive
from grpox.runtime.world import World, start_world, translate_lost_ranks
from grpox.training.assembly import Assembly, open_assembly
from grpox.training.build import (
    TrainInputs,
    build_engines,
    build_observers,
    build_trainer,
    open_inputs,
    unused_modes,
)
from grpox.training.inputs import decide_longest, model_config, open_model, provides
from grpox.training.trainer import Trainer

logger = get_logger(__name__)
FINISHING = "the steps are done: saving the model first; once more to end at once"


def train_run(
    run: ResolvedRun,
    resume: bool = False,
    allow_changes: bool = False,
    needs_checkpoint: bool = False,
    started: float | None = None,
) -> dict[str, Any]:
    """Train a run to its end, opened by `open_run`; a collective. Returns the content of ``summary.json``."""
    with open_run(run, resume, allow_changes, needs_checkpoint, started) as opened:
        return opened.train() if isinstance(opened, OpenRun) else opened


@dataclass
class OpenRun:
    """A run with its parts: `trainer` takes single steps, `train` the remaining ones and saves the model."""

    assembly: Assembly
    trainer: Trainer
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
        with first_signal_waits(FINISHING if self.trainer.world.is_main else ""):
            return self._train()

    def _train(self) -> dict[str, Any]:
        trainer, summary = self.trainer, self.summary
        config, context = self.assembly.run.config, trainer.context
        summary |= trainer.run() | trainer.checkpoints.summary()
        if slower := unused_modes(trainer.policy.engine, trainer.policy.reference):
            summary["unused_forward_modes"] = slower
        self.generating.close()
        folder, adapter, path = (
            context.output_dir / name for name in ("model", ADAPTER_FOLDER, "summary.json")
        )
        with trainer.times.phase("save"):
            engine, tokenizer = trainer.policy.engine, self.assembly.tokenizer
            trained, total = parameter_counts(engine.module)
            summary |= {"trained_parameters": trained, "parameters": total}
            save_model(engine, tokenizer, self.generation_config, folder, trainer.world)
            if config.model.lora is not None:
                save_adapter(engine, self.model.name_or_path, adapter, trainer.world)
                summary["adapter"] = str(adapter)
        summary |= {"model": str(folder), "output_dir": str(context.output_dir), "source": context.source}
        self.release_model()
        if trainer.world.is_main:
            with suppress(OSError):  # on a full disk, only the card is lost
                card = model_card(config, summary, context.fingerprints, trainer.state.metrics)
                write_atomically(folder / CARD, card)
            try:
                if summary.get("alarms") or (path.parent / ALARMS).exists():
                    write_alarms(path.parent, summary.get("alarms", []))
                write_atomically(path, as_strict_json(summary) + "\n")
            except OSError as error:
                raise RunFailed(write_error_message(error, path)) from error
            trainer.observers.checkpoint_saved(context, engine.steps, folder)
        return summary

    def release_model(self) -> None:
        """Give a model from Python its whole weights back; no step can be taken afterwards; a collective."""
        self.generating.close()
        if self.assembly.run.given.model is not None:
            make_whole(self.model, self.trainer.policy.engine, self.device)


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
        the run before its first step, or the summary of a run that is already complete.
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
    with hold_on_all_ranks(Path(config.output_dir), world), ExitStack() as stack:
        recorded = _decide_automatic(run, world, resume)
        # The second: recorded without a date, by an old run.
        day = recorded.get(CHAT_DATE, recorded.get(STARTED))
        assembly = stack.enter_context(open_assembly(run, world, (OF_TRAINING, OF_EVALUATION), day))
        lock = lock_of(run)
        check_ranks(world, lock, redacted(config.model_dump(mode="json")))
        check_deepspeed(config)
        if config.train.deterministic:
            has_own = provides(run, Capability.OTHER_NUMERICS)
            check_determinism(run.components["generator"].label, has_own, world.device)
        if config.hub is not None and world.is_main:
            check_hub(config.hub)
        seed_libraries(config.train.seed)
        _log(world, "reading the data: %s", config.data.path or "the dataset's rows")
        components = RunComponents(run, world, assembly.times)
        inputs = open_inputs(assembly, components, lock)
        if resume and (done := finished(config, inputs.schedule.total_steps)):
            early = ", where it stopped early" if "stopped_early" in done else ""
            _log(world, "%s: the run is complete, %s steps%s", config.output_dir, done["steps"], early)
            yield done
            return
        generator = assembly.open_generator()
        components.add("generator", generator)
        data = fingerprints(config) | dict(run.given.fingerprints)
        checkpoint = newest_good(Path(config.output_dir), world) if resume else None
        if checkpoint is not None:
            check_changes(checkpoint, config, lock, data, world, allow_changes)
        elif needs_checkpoint:
            raise no_checkpoint(Path(config.output_dir))
        context = _context(inputs, data, started, checkpoint, resume and began(config))
        observers = build_observers(inputs)
        if config.tracking:
            _log(world, "starting to track: %s", ", ".join(config.tracking))
        with (
            Watchdog(config.watchdog, assembly.times, context.output_dir / "stalls", world.rank) as watchdog,
            _observed(context, observers, world) as summary,
            translate_lost_ranks(world, assembly.times),
            machine_metrics(context.output_dir, config.logging.system_metrics_every, world),
            _opened(
                inputs, context, observers, generator, checkpoint, allow_changes, watchdog, summary
            ) as opened,
        ):
            yield opened
        if world.is_main and config.hub is not None:  # last, so that a failed push loses nothing
            address = push_model(Path(summary["model"]), config, config.hub, summary)
            logger.info("pushed to %s", address)


def _context(
    inputs: TrainInputs,
    data: Mapping[str, str],
    started: float,
    checkpoint: Checkpoint | None,
    starts_over: bool,
) -> RunContext:
    run, schedule = inputs.assembly.run, inputs.schedule
    progress, config = checkpoint.progress if checkpoint else None, run.config
    return RunContext(
        config=config,
        output_dir=Path(config.output_dir),
        total_steps=schedule.total_steps,
        world_size=inputs.assembly.world.size,
        versions=versions([*run.distributions, *(["peft"] if config.model.lora else [])]),
        git_commit=git_commit(),
        source=run.source,
        resumed_at=progress.step if progress else 0 if starts_over else None,
        metrics_bytes=progress.metrics_bytes if progress else 0,
        generations_before=schedule.generations_until(progress.step) if progress else 0,
        fingerprints=data,
        started=started,
    )


def _log(world: World, message: str, *values: object) -> None:
    """Name the phase that begins, once, because loading may take minutes without any other output."""
    if world.is_main:
        logger.info(message, *values)


@translate_exits(FOREIGN)
def _decide_automatic(run: ResolvedRun, world: World, resume: bool) -> Mapping[str, Any]:
    """Replace ``auto`` by the precision, lengths and size of micro-batches that the run has; a collective.

    A resumed run keeps the values that it began with, also on other devices. The values are returned.
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
        _log(world, "position factors of the model: %s, for up to %s tokens", choice, longest)
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
    inputs: TrainInputs,
    context: RunContext,
    observers: Observers,
    generator: Generator,
    checkpoint: Checkpoint | None,
    allow_changes: bool,
    watchdog: Watchdog,
    summary: dict[str, Any],
) -> Iterator[OpenRun]:
    """Load the model, start the generator, and restore the checkpoint; the generator ends with the block."""
    assembly, times = inputs.assembly, inputs.assembly.times
    run, world, config = assembly.run, assembly.world, assembly.run.config
    with translate_exits(FOREIGN), ExitStack() as generating:
        _log(world, "loading the model: %s", config.model.path)
        model, for_generator = assembly.load(lambda: open_model(run))
        device, generation_config = model.device, model.generation_config
        files = ShardFiles(config.checkpoint.background)
        _log(world, "setting up DeepSpeed, then the generator %s", run.components["generator"].label)
        with times.phase("shard"):
            engine, reference = build_engines(inputs, model, files)
        sampler = assembly.start_sampler(generator, for_generator, engine)
        generating.callback(times.phase("close")(generator.close))
        trainer = build_trainer(inputs, context, observers, engine, reference, sampler, files)
        if checkpoint is not None:
            with times.phase("restore"):
                states, schedule = inputs.components, trainer.schedule
                checkpoint.restore(
                    trainer.state, trainer.policy, states, schedule, config.train.seed, allow_changes
                )
                trainer.steering.restore()
        inputs.components.start()
        enable_tcp_keepalive(config.watchdog.host_lost_after)  # connections of engine and generator too
        times.take()  # none of this is the first step's
        yield OpenRun(assembly, trainer, model, device, generation_config, watchdog, generating, summary)


def make_whole(model: PreTrainedModel, engine: Engine, device: torch.device) -> None:
    """Take `model` out of its engine, with whole parameters on `device`; a collective that closes the engine.

    ZeRO-3 has replaced each module's parameters by shards and added hooks to its forward. Adapters are merged.
    """
    streamed = stream_parameters(engine.module.named_parameters())
    whole = {name: tensor.to(device, copy=True) for name, tensor in streamed}
    # Tied weights are one parameter with several names; the stream has one of them.
    shards = dict(model.named_parameters(remove_duplicate=False))
    by_shard = {id(shards[name]): nn.Parameter(tensor) for name, tensor in whole.items()}
    engine.close()
    for module in model.modules():
        module._parameters = {
            name: shard if shard is None else by_shard[id(shard)] for name, shard in module._parameters.items()
        }
    if adapted_layers(model):
        merge_adapters(model)
    model.to(device).eval()
