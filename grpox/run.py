"""From a resolved run file to a finished run: puts the parts together, trains, saves, writes the summary."""

from __future__ import annotations

import json
import logging
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.collect import Collector, Sampler
from grpox.config import RunConfig
from grpox.contracts import Generator, GeneratorContext, RunContext
from grpox.engine import Engine, FrozenEngine
from grpox.errors import ConfigError
from grpox.evaluation import Evaluator
from grpox.export import save_model
from grpox.models import architecture_of, load_model, load_tokenizer, stop_token_ids
from grpox.observing.display import TerminalDisplay
from grpox.observing.observers import Observers
from grpox.observing.provenance import git_commit, versions
from grpox.observing.record import LocalRecord
from grpox.optimizers import AdamW, NamedSchedule
from grpox.prompts import PromptSet, load_file
from grpox.rewards import NamedReward, column_problems
from grpox.runfile.load import ResolvedRun, load_run, resolve_config
from grpox.sampling import BatchPlan, PromptSampler, Schedule
from grpox.trainer import Trainer
from grpox.update import PolicyUpdate
from grpox.world import World, start_world


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    rewards: Sequence[Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    """Train as `grpox train` does, from Python.

    Args:
        config: a run file's path, a bundled recipe's name, or the run itself as mapping or `RunConfig`.
        overrides: ``a.b=c``, as on the command line; only with a run file or recipe.
        rewards: functions in place of the config's rewards, each with weight 1.

    Returns:
        what ``summary.json`` holds: accuracy before and after, steps, seconds.

    Raises:
        ConfigError: the config is wrong; nothing was loaded.
        RunFailed: the run failed.
    """
    if isinstance(config, str | Path):
        return train_run(load_run(config, overrides, functions=rewards))
    if overrides:
        raise TypeError("overrides go with a run file or recipe; change the mapping or RunConfig itself")
    return train_run(resolve_config(config, Path.cwd(), "python", functions=rewards))


def train_run(run: ResolvedRun) -> dict[str, Any]:
    """Train a resolved run to its end; a collective of all ranks. Returns what ``summary.json`` holds."""
    config = run.config
    _quieten()
    world = start_world()
    _seed(config.train.seed)
    tokenizer = load_tokenizer(config.model)
    prompts = _training_prompts(run, tokenizer)
    rewards = _rewards(run, prompts)
    schedule = _schedule(config, world, len(prompts))
    context = _context(run, world, schedule)
    observers = _observers(run, world)
    try:
        if world.is_main:
            observers.run_started(context)
        parts = _Parts(run, world, schedule, tokenizer, prompts, context, observers, rewards)
        summary = _train_and_save(parts)
    except BaseException as error:
        if world.is_main:
            observers.run_failed(context, error)
        raise
    if world.is_main:
        observers.run_finished(context, summary)
    return summary


@dataclass(frozen=True)
class _Parts:
    """What exists before the model is loaded."""

    run: ResolvedRun
    world: World
    schedule: Schedule
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet
    context: RunContext
    observers: Observers
    rewards: list[NamedReward]


def _train_and_save(parts: _Parts) -> dict[str, Any]:
    config, world = parts.run.config, parts.world
    model = load_model(config.model)
    generation_config = model.generation_config
    generator: Generator = parts.run.build("generator")
    build_model = architecture_of(model)
    stops = stop_token_ids(model, parts.tokenizer)
    reference = FrozenEngine(load_model(config.model), config, world) if config.train.beta > 0 else None
    engine = _engine(parts, model)
    generator.start(
        GeneratorContext(
            model_path=Path(config.model.path),
            build_model=build_model,
            tokenizer=parts.tokenizer,
            stop_token_ids=stops,
            device=world.device,
            rank=world.rank,
            world_size=world.size,
            seed=config.train.seed,
        )
    )
    try:
        summary: dict[str, Any] = _trainer(parts, engine, reference, generator).run()
    finally:
        generator.close()
    folder = parts.context.output_dir / "model"
    save_model(engine, parts.tokenizer, generation_config, folder, world)
    summary |= {"model": str(folder), "output_dir": str(parts.context.output_dir), "source": parts.run.source}
    if world.is_main:
        text = json.dumps(summary, indent=2) + "\n"
        (parts.context.output_dir / "summary.json").write_text(text, encoding="utf-8")
        parts.observers.checkpoint_saved(parts.context, engine.steps, folder)
    return summary


def _trainer(parts: _Parts, engine: Engine, reference: FrozenEngine | None, generator: Generator) -> Trainer:
    run, config, world = parts.run, parts.run.config, parts.world
    sampler = Sampler(engine, generator, parts.rewards, world, config.train.seed)
    collector = Collector(
        sampler, parts.prompts, run.build("advantage"), config.sampling, config.train.num_generations
    )
    loss, correction = run.build("loss"), run.build("correction")
    return Trainer(
        context=parts.context,
        world=world,
        schedule=parts.schedule,
        collector=collector,
        policy=PolicyUpdate(engine, reference, loss, correction, config, world),
        evaluator=_evaluator(parts, sampler),
        observers=parts.observers,
        pad_token_id=parts.tokenizer.pad_token_id,
    )


def _engine(parts: _Parts, model: PreTrainedModel) -> Engine:
    run, train = parts.run, parts.run.config.train
    optimizer = run.build("train.optimizer") if train.optimizer else AdamW(train)
    scheduler = run.build("train.scheduler") if train.scheduler else NamedSchedule(train)
    return Engine(model, run.config, parts.world, parts.schedule.total_steps, optimizer, scheduler)


def _evaluator(parts: _Parts, sampler: Sampler) -> Evaluator | None:
    config = parts.run.config
    if config.evaluation is None:
        return None
    dataset = load_file(config.evaluation.path)
    column, template = config.data.prompt_column, config.model.chat_template_kwargs
    prompts = PromptSet(dataset, column, parts.tokenizer, template)
    return Evaluator(sampler, prompts, config.evaluation, config.sampling)


def _training_prompts(run: ResolvedRun, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    data = run.config.data
    dataset = load_file(data.path) if data.path else run.build("data.source").load()
    return PromptSet(dataset, data.prompt_column, tokenizer, run.config.model.chat_template_kwargs)


def _schedule(config: RunConfig, world: World, num_prompts: int) -> Schedule:
    train = config.train
    plan = BatchPlan.from_config(train, world.size)
    sampler = PromptSampler(num_prompts, plan.prompts_per_generation, train.shuffle_dataset, train.seed)
    return Schedule(plan, sampler, train.max_steps, train.num_train_epochs)


def _rewards(run: ResolvedRun, prompts: PromptSet) -> list[NamedReward]:
    rewards = [
        NamedReward(label, run.build(f"rewards[{place}]"), ref.weight)
        for place, (label, ref) in enumerate(zip(run.config.reward_labels, run.config.rewards, strict=True))
    ]
    problems = column_problems(rewards, prompts.column_names)
    if problems:
        raise ConfigError(problems)
    return rewards


def _observers(run: ResolvedRun, world: World) -> Observers:
    selected: list[tuple[str, object]] = []
    if world.is_main:
        selected = [("record", LocalRecord()), ("terminal", TerminalDisplay())]
        selected += [(name, run.build(f"tracking.{name}")) for name in run.config.tracking]
    return Observers(run.registry.plugins.manager, selected)


def _context(run: ResolvedRun, world: World, schedule: Schedule) -> RunContext:
    return RunContext(
        config=run.config,
        output_dir=Path(run.config.output_dir),
        total_steps=schedule.total_steps,
        world_size=world.size,
        versions=versions(run.distributions),
        git_commit=git_commit(),
        source=run.source,
    )


def _seed(seed: int) -> None:
    """Seed every library that draws numbers in this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _quieten() -> None:
    """Libraries' own chatter and bars would bury the run's; warnings stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
