"""Evaluation on held-out prompts: greedy by default, scored by the run's reward functions or by its own.

It is done within a run, or by `evaluate_model` without one.

pass@k is the chance that at least one of k completions is right, estimated without bias from n of them. Chen et
al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), equation 1:
pass@k = E over prompts of 1 - C(n - c, k) / C(n, k), where c of n completions are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from grpox.checkpoint.rng import random_numbers_kept
from grpox.config import EvaluationConfig, SamplingConfig
from grpox.config.sampling import sampling_of
from grpox.contracts import Capability, ScoredRollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.policy.memory_plan.of_run import generator_settings
from grpox.policy.models import load_model
from grpox.rollout.collector import Scorer, sample_and_score
from grpox.rollout.metrics import error_metrics, length_metrics, mean
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.isolation import OF_EVALUATION, OF_TRAINING, reward_functions
from grpox.rollout.rewards.scoring import Logged, ScoredRow, weighed_mean_logged, weighted_sum, with_logged
from grpox.rollout.sampler import CompletionSampler, FixedPolicy, SampleRequest
from grpox.runtime.foreign_code import FOREIGN, translate_exits
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.setup import quieten, seed_libraries
from grpox.runtime.watchdog import GRACE
from grpox.runtime.world import World, start_world, translate_lost_ranks
from grpox.training.inputs import (
    HeldOut,
    generator_context,
    load_on_every_rank,
    open_generator,
    open_held_out,
    open_tokenizer,
    provides,
    start_sampler,
)

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun


STREAM = 1
"""Tells the random numbers of evaluations from those of training, whose number is 0."""

BEFORE_TRAINING = TrainerState(global_step=0, max_steps=0, epoch=0.0)


class Evaluator:
    """Samples completions of every held-out prompt and reports means over all of them.

    Each prompt is drawn with a seed of its own, so that neither the number of ranks nor the size of a batch
    changes what is sampled; and the random numbers of the process are afterwards what they were.

    Args:
        sampling: the run's; the evaluation's own settings are put over it.
    """

    def __init__(
        self,
        sampler: CompletionSampler,
        scorer: Scorer,
        prompts: PromptSet,
        config: EvaluationConfig,
        sampling: SamplingConfig,
    ) -> None:
        self.sampler = sampler
        self.scorer = scorer
        self.prompts = prompts
        self.config = config
        self.sampling = sampling_of(config, sampling)

    def is_due(self, step: int, total_steps: int) -> bool:
        """Tell whether to evaluate after `step`, as after the last one in any case."""
        return step == total_steps or (self.config.every > 0 and step % self.config.every == 0)

    def evaluate(self, state: TrainerState) -> dict[str, float]:
        """The metrics of one evaluation, over all ranks; a collective."""
        return self.metrics(*self.sample(state))

    def sample(
        self, state: TrainerState, done: Callable[[int], None] = lambda prompts: None
    ) -> tuple[list[ScoredRow], Logged]:
        """The scored completions of all prompts, prompt by prompt, and what the functions logged; a collective.

        Args:
            done: told after each batch how many prompts are through.
        """
        rows: list[ScoredRow] = []
        logs: list[tuple[Logged, int]] = []
        per_batch = self.config.batch_size * self.sampler.world.size
        with random_numbers_kept():
            for start in range(0, len(self.prompts), per_batch):
                indices = range(start, min(start + per_batch, len(self.prompts)))
                request = SampleRequest(
                    self.prompts,
                    indices,
                    self.config.num_generations,
                    self.sampling,
                    (STREAM, state.global_step, start),
                    [self._seed(state, index) for index in indices],
                )
                scored, logged = sample_and_score(self.sampler, self.scorer, request, state)
                rows += scored
                logs.append((logged, len(scored)))
                done(indices.stop)
        return rows, weighed_mean_logged(logs)

    def metrics(self, rows: Sequence[ScoredRow], logged: Logged) -> dict[str, float]:
        """The metrics of what `sample` gave."""
        metrics, renamed = with_logged(evaluation_metrics(rows, self.scorer.rewards, self.config), logged)
        if self.sampler.world.is_main:
            self.scorer.warn.all({what: what for what in renamed})
        return metrics

    def _seed(self, state: TrainerState, index: int) -> int:
        """Return the seed of the draws for the prompt at `index`, after so many steps."""
        entropy = [self.sampler.seed, STREAM, state.global_step, index]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def evaluation_metrics(
    rows: Sequence[ScoredRow], rewards: Sequence[NamedReward], config: EvaluationConfig
) -> dict[str, float]:
    """Means and standard deviations over all completions, and pass@k over prompts.

    Args:
        rows: of every prompt its `num_generations` completions, one after the other.
        rewards: K functions, those that scored `rows`.
    """
    labels = [reward.label for reward in rewards]
    columns = [[score for row in rows if (score := row.rewards[i]) is not None] for i in range(len(labels))]
    place = labels.index(config.accuracy or labels[0])
    metrics = {"accuracy": mean(columns[place]) if columns[place] else math.nan}
    counts = []  # of each prompt: completions that have a score, those that are right
    for start in range(0, len(rows), config.num_generations):
        of_prompt = rows[start : start + config.num_generations]
        scores = [score for row in of_prompt if (score := row.rewards[place]) is not None]
        counts.append((len(scores), sum(score >= config.right_at for score in scores)))
    metrics |= {f"pass_at_{k}": mean_pass_at_k(counts, k) for k in config.pass_at_k}
    totals = totals_of(rows, rewards).tolist()
    metrics |= _spread("reward", "reward_std", [total for total in totals if not math.isnan(total)])
    for label, column in zip(labels, columns, strict=True):
        metrics[f"rewards/{label}/mean"] = math.nan
        metrics |= _spread(f"rewards/{label}/mean", f"rewards/{label}/std", column)
        metrics[f"rewards/{label}/abstained"] = 1 - len(column) / len(rows)
    metrics |= error_metrics(rewards, [row.failed for row in rows])
    return metrics | length_metrics([row.rollout for row in rows])


def totals_of(rows: Sequence[ScoredRow], rewards: Sequence[NamedReward]) -> torch.Tensor:
    """f64[N], the weighted sum of each row; NaN where every function abstained."""
    values = [[math.nan if value is None else value for value in row.rewards] for row in rows]
    weights = torch.tensor([reward.weight for reward in rewards])
    return weighted_sum(torch.tensor(values).reshape(len(rows), len(rewards)), weights)


def _spread(mean_name: str, std_name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation, the latter over n - 1 as in training; nothing where there are no values."""
    if not values:
        return {}
    std = float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0
    return {mean_name: mean(values), std_name: std}


def pass_at_k(n: int, c: int, k: int) -> float:
    """The share of the C(n, k) choices of k completions that hold a right one.

    Counted in whole numbers and divided once, so that nothing can overflow or cancel: the result is the float
    nearest to it.

    Args:
        n: completions of the prompt, at least k.
        c: those that are right.
        k: at least 1.

    Raises:
        ValueError: the numbers do not fit together.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} completions, {c} of them right")
    choices = comb(n, k)
    return (choices - comb(n - c, k)) / choices


def mean_pass_at_k(prompts: Sequence[tuple[int, int]], k: int) -> float:
    """The mean over `prompts`, (n, c) of each; those with fewer than k completions are left out.

    Returns:
        NaN where none is left.
    """
    found = [pass_at_k(n, c, k) for n, c in prompts if n >= k]
    return sum(found) / len(found) if found else math.nan


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
        return _evaluate(run, run.config.evaluation, functions, checkpoint, world, done)


@translate_exits(FOREIGN)
def _evaluate(
    run: ResolvedRun,
    evaluation: EvaluationConfig,
    functions: Sequence[Any],
    checkpoint: Path | None,
    world: World,
    done: Callable[[int, int], None],
) -> Evaluated:
    times, tokenizer = PhaseTimes(generator=generator_settings(run)), open_tokenizer(run)
    held_out = HeldOut.bind(run.config, open_held_out(run, tokenizer, evaluation), functions)
    count = len(held_out.prompts)
    generator = open_generator(run, world)

    def load() -> PreTrainedModel:
        if checkpoint is None:
            model = load_model(run.config.model)
        else:
            # Only here, because it knows of DeepSpeed's files.
            from grpox.checkpoint.export import checkpoint_model

            model = checkpoint_model(checkpoint, run.config.model)
        return model.eval().requires_grad_(False).to(world.device)

    with translate_lost_ranks(world, times):
        model = load_on_every_rank(load, world, times)
        context = generator_context(model, tokenizer, run.config, world)
        sampler = start_sampler(generator, context, FixedPolicy(model), world, times, sleeps=False)
        try:
            scorer = Scorer(held_out.rewards, provides(run, Capability.STREAMING))
            evaluator = Evaluator(sampler, scorer, held_out.prompts, evaluation, run.config.sampling)
            tell = (lambda number: done(number, count)) if world.is_main else (lambda number: None)
            rows, logged = evaluator.sample(BEFORE_TRAINING, tell)
        finally:
            generator.close()
        metrics = evaluator.metrics(rows, logged)
    completions = _completions(rows, held_out, evaluation.num_generations)
    return Evaluated(metrics, completions, count, world.size, world.is_main)


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
