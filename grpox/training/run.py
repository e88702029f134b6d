"""From a resolved run file to a finished run: puts the parts together, trains, saves, writes the summary."""

from __future__ import annotations

import grpox.runtime.quick_transformers  # noqa: F401 # isort: skip # before transformers itself

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.checkpoint.faults.dump import FaultDumps
from grpox.checkpoint.fingerprints import fingerprints
from grpox.checkpoint.hub import check_hub, push_model
from grpox.checkpoint.model_card import write_card
from grpox.checkpoint.resume import Checkpoint, check_changes, newest_good, no_checkpoint
from grpox.checkpoint.save_model import save_model
from grpox.checkpoint.saver import CheckpointSaver
from grpox.checkpoint.shards import ShardFiles
from grpox.config import RunConfig
from grpox.config.evaluation_settings import rewards_of
from grpox.contracts import Capability, Generator, GeneratorContext, RunContext
from grpox.data.prompt_cursor import PromptDraws
from grpox.data.prompts import PromptSet
from grpox.data.schedule import Schedule
from grpox.errors import RunFailed
from grpox.errors.redaction import redacted
from grpox.errors.warn_once import TellOnce
from grpox.observing.display import TerminalDisplay
from grpox.observing.early_stop import EarlyStop
from grpox.observing.machine_metrics import machine_metrics
from grpox.observing.observers import Observers
from grpox.observing.provenance import git_commit, versions
from grpox.observing.record import LocalRecord, began, finished
from grpox.observing.report.observer import RunReport
from grpox.plugins.component import FOREIGN, exits_told
from grpox.policy.adapter_folder import FOLDER as ADAPTER_FOLDER
from grpox.policy.adapter_folder import save_adapter
from grpox.policy.adapter_reference import BaseAsReference
from grpox.policy.deepspeed_config import check_deepspeed
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.lora.layers import parameter_counts, told_of
from grpox.policy.memory_plan.at_load import check_load, free_memory
from grpox.policy.models import architecture_of, stop_token_ids
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.policy.scoring_forward import not_taken
from grpox.rollout.collector import Collector
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.fitting import fitting_rewards
from grpox.rollout.rewards.isolation import OF_EVALUATION, OF_TRAINING, reward_functions
from grpox.rollout.sampler import Sampler
from grpox.runfile.load import ResolvedRun, load_run, resolve_config
from grpox.runfile.lock.file import LockFile
from grpox.runfile.lock.model import Lock
from grpox.runfile.lock.of_run import lock_of
from grpox.runfile.lock.ranks import check_ranks
from grpox.runtime.collective_errors import on_every_rank
from grpox.runtime.files import keep_files_from_others, unwritten, write_whole
from grpox.runtime.lost_rank import lost_ranks_told
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.run_lock import hold_on_all_ranks
from grpox.runtime.setup import quieten, seed_libraries
from grpox.runtime.tcp_keepalive import lose_silent_peers
from grpox.runtime.watchdog import GRACE, Watchdog
from grpox.runtime.world import World, start_world
from grpox.training.evaluation import Evaluator
from grpox.training.given_model import make_whole
from grpox.training.given_objects import given_objects
from grpox.training.inputs import (
    model_config,
    open_model,
    open_prompts,
    open_reference,
    open_schedule,
    open_tokenizer,
)
from grpox.training.trainer import Trainer
from grpox.update.nonfinite import NonFinitePolicy
from grpox.update.policy_update import PolicyUpdate

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
    """Train a resolved run to its end; a collective of all ranks. Returns what ``summary.json`` holds.

    Args:
        resume: go on from the newest good checkpoint in the run's folder; without one the run starts over.
        allow_changes: even where config, data or plugins are not what the checkpoint was made with.
        needs_checkpoint: refuse to start over.
    """
    quieten()
    keep_files_from_others()
    # Longer than any rank may stall, so that the one that does tells it before the others give up.
    world = start_world(run.config.watchdog.end_after + 2 * GRACE)
    lose_silent_peers(run.config.watchdog.host_lost_after)
    with (
        hold_on_all_ranks(Path(run.config.output_dir), world),
        reward_functions(run) as functions,
        reward_functions(run, OF_EVALUATION) as of_evaluation,
    ):
        return _train_run(run, world, functions, of_evaluation, resume, allow_changes, needs_checkpoint)


@exits_told(FOREIGN)
def _train_run(
    run: ResolvedRun,
    world: World,
    functions: Sequence[Any],
    of_evaluation: Sequence[Any],
    resume: bool,
    allow_changes: bool,
    needs_checkpoint: bool,
) -> dict[str, Any]:
    config = run.config
    lock = lock_of(run)
    check_ranks(world, lock, redacted(config.model_dump(mode="json")))
    check_deepspeed(config)
    if config.hub is not None and world.is_main:
        check_hub(config.hub)
    seed_libraries(config.train.seed)
    tokenizer = open_tokenizer(run)
    prompts, held_out = open_prompts(run, tokenizer)
    rewards = fitting_rewards(run.config.rewards, functions, prompts)
    held_out_rewards = rewards
    if held_out is not None:
        key = OF_EVALUATION if of_evaluation else OF_TRAINING
        held_out_rewards = fitting_rewards(rewards_of(config), of_evaluation or functions, held_out, key)
    schedule = open_schedule(run, prompts, world.size)
    if resume and (done := finished(config, schedule.total_steps)):
        if world.is_main:
            early = ", where it stopped early" if "stopped_early" in done else ""
            print(f"{config.output_dir}: the run is complete, {done['steps']} steps{early}", flush=True)
        return done
    check_load(run, free_memory(world))
    generator: Generator = run.build("generator")
    if world.is_main and hasattr(generator, "preflight"):
        generator.preflight(model_config(run))
    data = fingerprints(config)
    checkpoint = newest_good(Path(config.output_dir), world) if resume else None
    if checkpoint is not None:
        check_changes(checkpoint, config, lock, data, world, allow_changes)
    elif needs_checkpoint:
        raise no_checkpoint(Path(config.output_dir))
    context = _context(run, world, schedule, resume, checkpoint, data)
    parts = _Parts(
        run,
        world,
        schedule,
        tokenizer,
        prompts,
        held_out,
        context,
        _observers(run, world, lock),
        rewards,
        held_out_rewards,
        generator,
        lock,
        data,
    )
    stacks = context.output_dir / "stalls"
    with Watchdog(config.watchdog, parts.times, stacks, world.rank):
        summary = _train_observed(parts, checkpoint)
    if world.is_main and config.hub is not None:
        # Last, so that a push that fails takes nothing with it.
        address = push_model(Path(summary["model"]), config, config.hub, summary)
        print(f"pushed to {address}", flush=True)
    return summary


@dataclass(frozen=True)
class _Parts:
    """What exists before the model is loaded."""

    run: ResolvedRun
    world: World
    schedule: Schedule
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet
    held_out: PromptSet | None
    context: RunContext
    observers: Observers
    rewards: list[NamedReward]
    held_out_rewards: list[NamedReward]
    """Those that score the evaluations."""
    generator: Generator
    lock: Lock
    data: Mapping[str, str]
    times: PhaseTimes = field(default_factory=PhaseTimes)


def _train_observed(parts: _Parts, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Train and save; the observers on rank 0 are told how it began and how it ended."""
    observers = parts.observers
    try:
        if parts.world.is_main:
            observers.run_started(parts.context)
        every = parts.run.config.logging.system_metrics_every
        with (
            lost_ranks_told(parts.world, parts.times),
            machine_metrics(parts.context.output_dir, every, parts.world),
        ):
            summary = _train_and_save(parts, checkpoint)
    except BaseException as error:
        if parts.world.is_main:
            observers.run_failed(parts.context, error)
        raise
    if parts.world.is_main:
        observers.run_finished(parts.context, summary)
    return summary


@exits_told(FOREIGN)
def _train_and_save(parts: _Parts, checkpoint: Checkpoint | None) -> dict[str, Any]:
    config, world, times = parts.run.config, parts.world, parts.times
    model = _open_model(parts)
    home = model.device
    generation_config = model.generation_config
    generator = parts.generator
    build_model = architecture_of(model)
    stops = stop_token_ids(model, parts.tokenizer)
    files = ShardFiles(config.checkpoint.background)
    with times.phase("shard"):
        engine, reference = _engines(parts, model, files)
    _start_generator(
        parts,
        GeneratorContext(
            model_path=Path(config.model.path),
            build_model=build_model,
            tokenizer=parts.tokenizer,
            stop_token_ids=stops,
            device=world.device,
            rank=world.rank,
            world_size=world.size,
            seed=config.train.seed,
            policy=engine.module,
        ),
    )
    try:
        trainer = _trainer(parts, engine, reference, generator, files)
        if checkpoint is not None:
            with times.phase("restore"):
                checkpoint.restore(trainer)
        lose_silent_peers(config.watchdog.host_lost_after)  # those that engine and generator have made too
        times.take()  # none of this is the first step's
        summary: dict[str, Any] = trainer.run() | trainer.checkpoints.summary()
    finally:
        with times.phase("close"):
            generator.close()
    trained, total = parameter_counts(engine.module)
    summary |= {"trained_parameters": trained, "parameters": total}
    folder = parts.context.output_dir / "model"
    with times.phase("save"):
        save_model(engine, parts.tokenizer, generation_config, folder, world)
        if config.model.lora is not None:
            save_adapter(engine, model.name_or_path, parts.context.output_dir / ADAPTER_FOLDER, world)
            summary["adapter"] = str(parts.context.output_dir / ADAPTER_FOLDER)
    if parts.run.given.model is not None:
        make_whole(model, engine, home)
    summary |= {"model": str(folder), "output_dir": str(parts.context.output_dir), "source": parts.run.source}
    if world.is_main:
        with suppress(OSError):  # a disk that is full up to the card costs the run nothing else
            write_card(folder, config, summary, parts.data, trainer.latest)
        _write_summary(parts.context.output_dir / "summary.json", summary)
        parts.observers.checkpoint_saved(parts.context, engine.steps, folder)
    return summary


def _write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise RunFailed(unwritten(error, path)) from error


def _open_model(parts: _Parts) -> PreTrainedModel:
    def load() -> PreTrainedModel:
        with parts.times.phase("load"):
            return open_model(parts.run)

    return on_every_rank(parts.world, parts.times, load)


def _engines(
    parts: _Parts, model: PreTrainedModel, files: ShardFiles
) -> tuple[Engine, FrozenEngine | BaseAsReference | None]:
    """The policy, and the reference where there is one."""
    config = parts.run.config
    if config.model.lora is None:
        reference = _reference(parts, model)
        return _engine(parts, model, files), reference
    engine = _engine(parts, model, files)
    if parts.world.is_main:
        print(told_of(engine.module), flush=True)
    return engine, None if config.train.beta == 0 else BaseAsReference(engine)


def _reference(parts: _Parts, model: PreTrainedModel) -> FrozenEngine | None:
    if parts.run.config.train.beta == 0:
        return None
    return FrozenEngine(open_reference(parts.run, model), parts.run.config, parts.world)


def _start_generator(parts: _Parts, context: GeneratorContext) -> None:
    def start() -> None:
        with exits_told("the generator"), parts.times.phase("start generator"):
            parts.generator.start(context)

    on_every_rank(parts.world, parts.times, start)


def _trainer(
    parts: _Parts,
    engine: Engine,
    reference: FrozenEngine | BaseAsReference | None,
    generator: Generator,
    files: ShardFiles,
) -> Trainer:
    run, config, world = parts.run, parts.run.config, parts.world
    streaming = Capability.STREAMING in run.components["generator"].provides
    sampler = Sampler(engine, generator, parts.rewards, world, config.train.seed, streaming, parts.times)
    collector = Collector(
        sampler,
        parts.prompts,
        run.build("advantage"),
        config.sampling,
        config.train.num_generations,
        ahead=config.train.max_staleness > 0,
        rounds=config.train.dynamic_sampling_rounds or 0,
    )
    loss, correction = run.build("loss"), run.build("correction")
    dumps = FaultDumps(engine, config, parts.tokenizer, world)
    nonfinite = NonFinitePolicy(config.train, world, dumps, sampler.warn)
    return Trainer(
        context=parts.context,
        world=world,
        schedule=parts.schedule,
        collector=collector,
        policy=PolicyUpdate(engine, reference, loss, correction, config, world, nonfinite),
        evaluator=_evaluator(parts, sampler),
        early_stop=_early_stop(config),
        observers=parts.observers,
        pad_token_id=parts.tokenizer.pad_token_id,
        checkpoints=CheckpointSaver(
            config.checkpoint,
            parts.context,
            world,
            parts.lock,
            parts.observers,
            files,
            parts.data,
            sampler.warn,
        ),
        logprobs_promised=Capability.LOGPROBS in run.components["generator"].provides,
        draws=PromptDraws(parts.schedule.sampler) if config.train.dynamic_sampling_rounds else None,
    )


def _engine(parts: _Parts, model: PreTrainedModel, files: ShardFiles) -> Engine:
    run, train = parts.run, parts.run.config.train
    optimizer = run.build("train.optimizer") if train.optimizer else AdamW(train)
    scheduler = run.build("train.scheduler") if train.scheduler else NamedSchedule(train)
    engine = Engine(model, run.config, parts.world, parts.schedule.total_steps, optimizer, scheduler, files)
    told = not_taken(model, train, engine.ways)
    if told and parts.world.is_main:
        TellOnce()("ways", f"{told} (docs/speed.md)")
    return engine


def _evaluator(parts: _Parts, sampler: Sampler) -> Evaluator | None:
    config = parts.run.config
    if config.evaluation is None or parts.held_out is None:
        return None
    return Evaluator(sampler, parts.held_out, config.evaluation, config.sampling, parts.held_out_rewards)


def _early_stop(config: RunConfig) -> EarlyStop | None:
    chosen = config.evaluation.early_stop if config.evaluation is not None else None
    return None if chosen is None else EarlyStop(chosen)


def _observers(run: ResolvedRun, world: World, lock: Lock) -> Observers:
    selected: list[tuple[str, object]] = []
    if world.is_main:
        # Before the record, and so told after it, when the folder is there; both before the trackers.
        selected = [("plugin lock", LockFile(lock)), ("record", LocalRecord()), ("terminal", TerminalDisplay())]
        selected += [(name, run.build(f"tracking.{name}")) for name in run.config.tracking]
        # The latest is told first: the report is there when the trackers end, which may upload it.
        selected.append(("run report", RunReport()))
    return Observers(run.registry.plugins.manager, selected)


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
