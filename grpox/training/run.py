"""From a resolved run file to a finished run: opens its inputs, trains, saves, writes the summary."""

from __future__ import annotations

import grpox.runtime.quick_transformers  # noqa: F401 # isort: skip # before transformers itself

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpox.checkpoint.resume import Checkpoint, check_changes, fingerprints, newest_good, no_checkpoint
from grpox.checkpoint.save_model import CARD, check_hub, model_card, push_model, save_model
from grpox.checkpoint.shards import ShardFiles
from grpox.config import RunConfig
from grpox.config.inputs import AUTO
from grpox.contracts import Capability, Generator, RunContext
from grpox.data.schedule import Schedule
from grpox.errors import RunFailed
from grpox.errors.redaction import redacted
from grpox.observing.machine_metrics import machine_metrics
from grpox.observing.observers import Observers
from grpox.observing.record import began, finished, git_commit, recorded_dtype, versions
from grpox.policy.adapter_folder import FOLDER as ADAPTER_FOLDER
from grpox.policy.adapter_folder import save_adapter
from grpox.policy.deepspeed_config import check_deepspeed
from grpox.policy.engine import Engine
from grpox.policy.lora.layers import parameter_counts
from grpox.policy.memory_plan.of_run import generator_settings
from grpox.policy.precision import allow_tf32, dtype_here
from grpox.rollout.rewards.isolation import OF_EVALUATION, reward_functions
from grpox.runfile.checked import unchecked_message
from grpox.runfile.load import ResolvedRun, load_run, resolve_config
from grpox.runfile.lock.differences import check_ranks
from grpox.runfile.lock.of_run import lock_of
from grpox.runtime.determinism import check_determinism, prepare_determinism
from grpox.runtime.files import restrict_umask, write_atomically, write_error_message
from grpox.runtime.foreign_code import FOREIGN, translate_exits
from grpox.runtime.logs import get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.run_lock import hold_on_all_ranks
from grpox.runtime.setup import quieten, seed_libraries
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
from grpox.training.given import given_objects, make_whole
from grpox.training.inputs import (
    generator_context,
    open_generator,
    open_model,
    provides,
    start_sampler,
)

logger = get_logger(__name__)

RewardArgument = Callable[..., Any] | str | Mapping[str, Any]
"""A reward function, a component's name, or a mapping as in a run file."""


def train(
    config: str | Path | Mapping[str, Any] | RunConfig | None = None,
    overrides: Sequence[str] = (),
    *,
    model: PreTrainedModel | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: Dataset | IterableDataset | Sequence[Mapping[str, Any]] | str | Path | None = None,
    eval_dataset: Dataset | Sequence[Mapping[str, Any]] | str | Path | None = None,
    rewards: RewardArgument | Sequence[RewardArgument] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train as `grpox train` does, from Python. Arguments but the first two stand in for keys of the config.

    Args:
        config: a run file's path, a bundled recipe's name, or the run itself as mapping or `RunConfig`. A
            mapping may leave out what the other arguments give.
        overrides: ``a.b=c``, as on the command line; only with a run file or recipe.
        model: in place of `model.path`. An object is trained itself: after the run it holds the trained
            weights, in evaluation mode, its dropout rates 0. If the run fails it is of no further use.
        tokenizer: the model's; default: the one saved where the model came from.
        dataset: in place of `data`: rows, or the path or hub id of a dataset. An IterableDataset is streamed.
        eval_dataset: in place of `evaluation.path`.
        rewards: in place of the config's: functions, names of components, or mappings as in a run file, where
            ``{"function": f, "weight": 0.5}`` gives a function a weight.
        resume: go on from the newest good checkpoint in output_dir; without one the run starts over.

    Returns:
        what ``summary.json`` holds: accuracy before and after, steps, seconds.

    Raises:
        ConfigError: the config or an argument is wrong, or a run goes on in output_dir; nothing was loaded.
        RunFailed: the run failed.
    """
    given = given_objects(model, tokenizer, dataset, eval_dataset, rewards)
    if isinstance(config, str | Path):
        return train_run(load_run(config, overrides, given=given), resume)
    if overrides:
        raise TypeError("overrides go with a run file or recipe; change the mapping or RunConfig itself")
    run = resolve_config({} if config is None else config, Path.cwd(), "python", given=given)
    return train_run(run, resume)


def train_run(
    run: ResolvedRun, resume: bool = False, allow_changes: bool = False, needs_checkpoint: bool = False
) -> dict[str, Any]:
    """Train a resolved run to its end; a collective of all ranks. Returns the content of ``summary.json``.

    Args:
        resume: continue from the newest good checkpoint in the run's folder; without one the run starts over.
        allow_changes: continue even if config, data or plugins differ from the checkpoint's.
        needs_checkpoint: refuse to start over.
    """
    config = run.config
    quieten()
    restrict_umask()
    if config.train.deterministic:
        prepare_determinism()
    # Longer than any rank may stall, so that a stalled rank reports it before the others give up.
    world = start_world(config.watchdog.end_after + 2 * GRACE)
    enable_tcp_keepalive(config.watchdog.host_lost_after)
    with (
        hold_on_all_ranks(Path(config.output_dir), world),
        reward_functions(run) as functions,
        reward_functions(run, OF_EVALUATION) as of_evaluation,
        translate_exits(FOREIGN),
    ):
        _decide_dtype(config, world, resume)
        lock = lock_of(run)
        _report_unchecked(run, world)
        check_ranks(world, lock, redacted(config.model_dump(mode="json")))
        check_deepspeed(config)
        _check_determinism(run, world)
        if config.hub is not None and world.is_main:
            check_hub(config.hub)
        seed_libraries(config.train.seed)
        times = PhaseTimes(generator=generator_settings(run))
        components = RunComponents(run, lock, world, times)
        inputs = TrainInputs.open(run, world, components, functions, of_evaluation)
        if resume and (done := finished(config, inputs.schedule.total_steps)):
            _say_complete(config, done, world)
            return done
        generator = open_generator(run, world)
        components.add("generator", generator)
        data = fingerprints(config)
        checkpoint = newest_good(Path(config.output_dir), world) if resume else None
        if checkpoint is not None:
            check_changes(checkpoint, config, lock, data, world, allow_changes)
        elif needs_checkpoint:
            raise no_checkpoint(Path(config.output_dir))
        context = _context(run, world, inputs.schedule, resume, checkpoint, data)
        observers = build_observers(run, world, components, lock)
        with (
            Watchdog(config.watchdog, times, context.output_dir / "stalls", world.rank),
            _observed(context, observers, world) as summary,
            translate_lost_ranks(world, times),
            machine_metrics(context.output_dir, config.logging.system_metrics_every, world),
        ):
            parts = TrainerParts(run, world, inputs, components, context, observers, lock, times)
            summary |= _train_and_save(parts, generator, checkpoint, allow_changes)
        if world.is_main:
            _push(config, summary)  # last, so that a failed push loses nothing
        return summary


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


def _decide_dtype(config: RunConfig, world: World, resume: bool) -> None:
    """Replace ``model.dtype: auto`` by the precision that the run has; a collective.

    A resumed run keeps the precision that it began with, also on other devices.
    """
    if config.model.dtype != AUTO:
        return
    recorded = [recorded_dtype(Path(config.output_dir))] if resume and world.is_main else [None]
    known = [dtype for dtype in world.gather(recorded) if dtype is not None]
    config.model.dtype = known[0] if known else dtype_here(config.model)


def _report_unchecked(run: ResolvedRun, world: World) -> None:
    if world.is_main and (message := unchecked_message(run)):
        logger.info("%s", message)


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


@translate_exits(FOREIGN)
def _train_and_save(
    parts: TrainerParts, generator: Generator, checkpoint: Checkpoint | None, allow_changes: bool
) -> dict[str, Any]:
    config, world, times = parts.run.config, parts.world, parts.times
    model = on_every_rank(world, times, times.phase("load")(lambda: open_model(parts.run)))
    allow_tf32(model, world.device)
    home, generation_config = model.device, model.generation_config
    for_generator = generator_context(model, parts.inputs.tokenizer, config, world)
    files = ShardFiles(config.checkpoint.background)
    with times.phase("shard"):
        engine, reference = build_engines(parts, model, files)
    sampler = start_sampler(generator, for_generator, engine, world, times)
    try:
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
        summary = trainer.run() | trainer.checkpoints.summary()
        if slower := unused_modes(engine, reference):
            summary["unused_forward_modes"] = slower
    finally:
        with times.phase("close"):
            generator.close()
    with times.phase("save"):
        summary |= _save_model(parts, engine, model.name_or_path, generation_config)
    if parts.run.given.model is not None:
        make_whole(model, engine, home)
    if world.is_main:
        folder, path = Path(summary["model"]), parts.context.output_dir / "summary.json"
        with suppress(OSError):  # on a full disk, only the card is lost
            card = model_card(config, summary, parts.context.fingerprints, trainer.state.metrics)
            write_atomically(folder / CARD, card)
        try:
            write_atomically(path, json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            raise RunFailed(write_error_message(error, path)) from error
        parts.observers.checkpoint_saved(parts.context, engine.steps, folder)
    return summary


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
    )
