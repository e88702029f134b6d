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
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.collect import Collector, Sampler
from grpox.config import RunConfig
from grpox.contracts import Generator, GeneratorContext, RunContext
from grpox.data.prompts import PromptSet
from grpox.deepspeed_config import check_deepspeed
from grpox.engine import Engine, FrozenEngine
from grpox.errors import ConfigError
from grpox.evaluation import Evaluator
from grpox.export import save_model
from grpox.given.model import make_whole
from grpox.given.objects import given_objects
from grpox.hub import check_hub, push_model
from grpox.models import architecture_of, stop_token_ids
from grpox.observing.display import TerminalDisplay
from grpox.observing.observers import Observers
from grpox.observing.provenance import git_commit, versions
from grpox.observing.record import LocalRecord
from grpox.optimizers import AdamW, NamedSchedule
from grpox.report.observer import RunReport
from grpox.rewards import NamedReward, column_problems
from grpox.run_inputs import open_model, open_prompts, open_reference, open_schedule, open_tokenizer
from grpox.runfile.load import ResolvedRun, load_run, resolve_config
from grpox.sampling import Schedule
from grpox.trainer import Trainer
from grpox.update import PolicyUpdate
from grpox.world import World, start_world

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

    Returns:
        what ``summary.json`` holds: accuracy before and after, steps, seconds.

    Raises:
        ConfigError: the config or an argument is wrong; nothing was loaded.
        RunFailed: the run failed.
    """
    given = given_objects(model, tokenizer, dataset, eval_dataset, rewards)
    if isinstance(config, str | Path):
        return train_run(load_run(config, overrides, given=given))
    if overrides:
        raise TypeError("overrides go with a run file or recipe; change the mapping or RunConfig itself")
    return train_run(resolve_config({} if config is None else config, Path.cwd(), "python", given=given))


def train_run(run: ResolvedRun) -> dict[str, Any]:
    """Train a resolved run to its end; a collective of all ranks. Returns what ``summary.json`` holds."""
    config = run.config
    _quieten()
    world = start_world()
    check_deepspeed(config)
    if config.hub is not None and world.is_main:
        check_hub(config.hub)
    _seed(config.train.seed)
    tokenizer = open_tokenizer(run)
    prompts, held_out = open_prompts(run, tokenizer)
    rewards = _rewards(run, prompts)
    schedule = open_schedule(run, prompts, world.size)
    context = _context(run, world, schedule)
    observers = _observers(run, world)
    try:
        if world.is_main:
            observers.run_started(context)
        parts = _Parts(run, world, schedule, tokenizer, prompts, held_out, context, observers, rewards)
        summary = _train_and_save(parts)
    except BaseException as error:
        if world.is_main:
            observers.run_failed(context, error)
        raise
    if world.is_main:
        observers.run_finished(context, summary)
        if config.hub is not None:
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


def _train_and_save(parts: _Parts) -> dict[str, Any]:
    config, world = parts.run.config, parts.world
    model = open_model(parts.run)
    home = model.device
    generation_config = model.generation_config
    generator: Generator = parts.run.build("generator")
    build_model = architecture_of(model)
    stops = stop_token_ids(model, parts.tokenizer)
    reference = FrozenEngine(open_reference(parts.run, model), config, world) if config.train.beta > 0 else None
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
            policy=engine.module,
        )
    )
    try:
        summary: dict[str, Any] = _trainer(parts, engine, reference, generator).run()
    finally:
        generator.close()
    folder = parts.context.output_dir / "model"
    save_model(engine, parts.tokenizer, generation_config, folder, world)
    if parts.run.given.model is not None:
        make_whole(model, engine, home)
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
    if config.evaluation is None or parts.held_out is None:
        return None
    return Evaluator(sampler, parts.held_out, config.evaluation, config.sampling)


def _rewards(run: ResolvedRun, prompts: PromptSet) -> list[NamedReward]:
    rewards = [
        NamedReward(label, run.build(f"rewards[{place}]"), ref.weight, ref.on_error, ref.timeout)
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
        # The latest is told first: the report is there when the trackers end, which may upload it.
        selected.append(("run report", RunReport()))
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
