"""An evaluation by itself: a model, the `evaluation` of a run file, and no training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.config import EvaluationConfig
from grpox.contracts import Capability, ScoredRollout, TrainerState
from grpox.policy.memory_plan.of_run import generator_settings
from grpox.policy.models import load_model
from grpox.rollout.collector import Scorer
from grpox.rollout.rewards.isolation import OF_EVALUATION, OF_TRAINING, reward_functions
from grpox.rollout.rewards.scoring import ScoredRow
from grpox.rollout.sampler import FixedPolicy
from grpox.runtime.collective_errors import lost_ranks_told
from grpox.runtime.foreign_code import FOREIGN, exits_told
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.setup import quieten, seed_libraries
from grpox.runtime.watchdog import GRACE
from grpox.runtime.world import World, start_world
from grpox.training.assembly import (
    HeldOut,
    generator_context,
    load_on_every_rank,
    open_generator,
    provides,
    start_sampler,
)
from grpox.training.evaluation import Evaluator, totals_of
from grpox.training.inputs import open_held_out, open_tokenizer

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
        times = PhaseTimes(generator=generator_settings(run))
        inputs = _open(run, run.config.evaluation, functions)
        return _evaluate(run, run.config.evaluation, inputs, checkpoint, world, times, done)


@exits_told(FOREIGN)
def _open(
    run: ResolvedRun, evaluation: EvaluationConfig, functions: Sequence[Any]
) -> tuple[PreTrainedTokenizerBase, HeldOut]:
    tokenizer = open_tokenizer(run)
    return tokenizer, HeldOut.bind(run.config, open_held_out(run, tokenizer, evaluation), functions)


@exits_told(FOREIGN)
def _evaluate(
    run: ResolvedRun,
    evaluation: EvaluationConfig,
    inputs: tuple[PreTrainedTokenizerBase, HeldOut],
    checkpoint: Path | None,
    world: World,
    times: PhaseTimes,
    done: Callable[[int, int], None],
) -> Evaluated:
    tokenizer, held_out = inputs
    generator = open_generator(run, world)
    with lost_ranks_told(world, times):
        model = load_on_every_rank(lambda: _load(run, checkpoint, world), world, times)
        context = generator_context(model, tokenizer, run.config, world)
        sampler = start_sampler(generator, context, FixedPolicy(model), world, times, sleeps=False)
        try:
            scorer = Scorer(held_out.rewards, provides(run, Capability.STREAMING))
            evaluator = Evaluator(sampler, scorer, held_out.prompts, evaluation, run.config.sampling)
            count = len(held_out.prompts)
            tell = (lambda number: done(number, count)) if world.is_main else (lambda number: None)
            rows, logged = evaluator.sample(BEFORE_TRAINING, tell)
        finally:
            generator.close()
        metrics = evaluator.metrics(rows, logged)
    completions = _completions(rows, held_out, evaluation.num_generations)
    return Evaluated(metrics, completions, count, world.size, world.is_main)


def _load(run: ResolvedRun, checkpoint: Path | None, world: World) -> PreTrainedModel:
    if checkpoint is None:
        model = load_model(run.config.model)
    else:
        # Only here, because it knows of DeepSpeed's files.
        from grpox.checkpoint.export import checkpoint_model

        model = checkpoint_model(checkpoint, run.config.model)
    return model.eval().requires_grad_(False).to(world.device)


def _completions(rows: Sequence[ScoredRow], held_out: HeldOut, size: int) -> list[ScoredRollout]:
    """The rows as a run's completions are saved; nothing is trained, so that there is no advantage."""
    labels = [reward.label for reward in held_out.rewards]
    totals = totals_of(rows, held_out.rewards).tolist()
    return [
        ScoredRollout(
            rollout=replace(row.rollout, group_id=place // size),
            prompt=held_out.prompts.text(place // size),
            completion=row.completion,
            rewards=dict(zip(labels, row.rewards, strict=True)),
            reward=total,
            advantage=math.nan,
            extra=row.extra,
        )
        for place, (row, total) in enumerate(zip(rows, totals, strict=True))
    ]
