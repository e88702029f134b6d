"""An evaluation by itself: a model, the `evaluation` of a run file, and no training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.config import EvaluationConfig
from grpox.config.evaluation_settings import rewards_of
from grpox.contracts import Capability, Generator, GeneratorContext, ScoredRollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.plugins.component import FOREIGN, exits_told
from grpox.policy.memory_plan.at_load import check_load, free_memory
from grpox.policy.models import architecture_of, load_model, stop_token_ids
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.fitting import fitting_rewards
from grpox.rollout.rewards.isolation import OF_EVALUATION, OF_TRAINING, reward_functions
from grpox.rollout.sampler import FixedPolicy, Sampler
from grpox.rollout.scored import ScoredRow
from grpox.runtime.collective_errors import on_every_rank
from grpox.runtime.lost_rank import lost_ranks_told
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.setup import quieten, seed_libraries
from grpox.runtime.watchdog import GRACE
from grpox.runtime.world import World, start_world
from grpox.training.evaluation import Evaluator, totals_of
from grpox.training.inputs import model_config, open_held_out, open_tokenizer

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun

BEFORE_TRAINING = TrainerState(global_step=0, max_steps=0, epoch=0.0)


@dataclass(frozen=True)
class Evaluated:
    """What became of an evaluation, on every rank."""

    metrics: dict[str, float]
    completions: list[ScoredRollout]
    """Of every prompt, one after the other; `group_id` is the prompt's row in the data."""
    prompts: int
    ranks: int
    main: bool
    """Whether this is the rank that tells."""


@dataclass(frozen=True)
class _Parts:
    """What exists before the model is loaded."""

    run: ResolvedRun
    evaluation: EvaluationConfig
    world: World
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet
    rewards: list[NamedReward]
    generator: Generator
    times: PhaseTimes


def evaluate_model(run: ResolvedRun, checkpoint: Path | None, done: Callable[[int, int], None]) -> Evaluated:
    """Evaluate a model as a run evaluates it before its first step; a collective of all ranks.

    Args:
        run: as `grpox.training.load_evaluation` reads it.
        checkpoint: whose weights take the place of those of `model.path`.
        done: told on the main rank how many prompts are through, and of how many.

    Raises:
        ConfigError: an input cannot be used, or the generator or a reward function cannot be built.
        RunFailed: sampling or scoring failed.
    """
    assert run.config.evaluation is not None
    quieten()
    world = start_world(run.config.watchdog.end_after + 2 * GRACE)
    seed_libraries(run.config.train.seed)
    key = OF_TRAINING if run.config.evaluation.rewards is None else OF_EVALUATION
    with reward_functions(run, key) as functions:
        parts = _parts(run, run.config.evaluation, world, functions, key)
        with lost_ranks_told(world, parts.times):
            return _evaluate(parts, checkpoint, done)


@exits_told(FOREIGN)
def _parts(
    run: ResolvedRun, evaluation: EvaluationConfig, world: World, functions: Sequence[Any], key: str
) -> _Parts:
    tokenizer = open_tokenizer(run)
    prompts = open_held_out(run, tokenizer, evaluation)
    rewards = fitting_rewards(rewards_of(run.config), functions, prompts, key)
    check_load(run, free_memory(world))
    generator: Generator = run.build("generator")
    if world.is_main and hasattr(generator, "preflight"):
        generator.preflight(model_config(run))
    return _Parts(run, evaluation, world, tokenizer, prompts, rewards, generator, PhaseTimes())


@exits_told(FOREIGN)
def _evaluate(parts: _Parts, checkpoint: Path | None, done: Callable[[int, int], None]) -> Evaluated:
    run, world, prompts = parts.run, parts.world, parts.prompts
    model = on_every_rank(world, parts.times, lambda: _loaded(parts, checkpoint))
    policy = FixedPolicy(model)
    on_every_rank(world, parts.times, lambda: _start(parts, model))
    try:
        streaming = Capability.STREAMING in run.components["generator"].provides
        seed = run.config.train.seed
        sampler = Sampler(
            policy, parts.generator, parts.rewards, world, seed, streaming, parts.times, rests=False
        )
        evaluator = Evaluator(sampler, prompts, parts.evaluation, run.config.sampling)
        tell = (lambda number: done(number, len(prompts))) if world.is_main else (lambda number: None)
        rows, logged = evaluator.sample(BEFORE_TRAINING, tell)
    finally:
        parts.generator.close()
    metrics = evaluator.metrics(rows, logged)
    return Evaluated(metrics, _completions(rows, parts), len(prompts), world.size, world.is_main)


def _loaded(parts: _Parts, checkpoint: Path | None) -> PreTrainedModel:
    with parts.times.phase("load"):
        if checkpoint is None:
            model = load_model(parts.run.config.model)
        else:
            # Only here, because it knows of DeepSpeed's files.
            from grpox.checkpoint.export import checkpoint_model

            model = checkpoint_model(checkpoint, parts.run.config.model)
        return model.eval().requires_grad_(False).to(parts.world.device)


def _start(parts: _Parts, model: PreTrainedModel) -> None:
    config, world = parts.run.config, parts.world
    with exits_told("the generator"), parts.times.phase("start generator"):
        parts.generator.start(
            GeneratorContext(
                model_path=Path(config.model.path),
                build_model=architecture_of(model),
                tokenizer=parts.tokenizer,
                stop_token_ids=stop_token_ids(model, parts.tokenizer),
                device=world.device,
                rank=world.rank,
                world_size=world.size,
                seed=config.train.seed,
                policy=model,
            )
        )


def _completions(rows: Sequence[ScoredRow], parts: _Parts) -> list[ScoredRollout]:
    """The rows as a run's completions are saved; nothing is trained, so that there is no advantage."""
    labels = [reward.label for reward in parts.rewards]
    size, totals = parts.evaluation.num_generations, totals_of(rows, parts.rewards).tolist()
    return [
        ScoredRollout(
            rollout=replace(row.rollout, group_id=place // size),
            prompt=parts.prompts.text(place // size),
            completion=row.completion,
            rewards=dict(zip(labels, row.rewards, strict=True)),
            reward=total,
            advantage=math.nan,
            extra=row.extra,
        )
        for place, (row, total) in enumerate(zip(rows, totals, strict=True))
    ]
