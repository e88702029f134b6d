"""Evaluation on held-out prompts: greedy by default, scored by the run's reward functions or by its own.

It is part of a run, or `evaluate_model` does it alone.

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
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from grpox.checkpoint.rng import preserve_random_state
from grpox.config import EvaluationConfig, SamplingConfig
from grpox.config.sampling import sampling_of
from grpox.contracts import Capability, ScoredRollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.policy.memory_plan.of_run import generator_settings
from grpox.policy.models import load_model
from grpox.policy.precision import allow_tf32
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
from grpox.runtime.world import on_every_rank, start_world, translate_lost_ranks
from grpox.training.inputs import (
    EvaluationInputs,
    generator_context,
    open_evaluation_prompts,
    open_generator,
    open_tokenizer,
    provides,
    start_sampler,
)

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun


STREAM = 1
"""Seed component that separates random numbers of evaluations from those of training (0)."""

BEFORE_TRAINING = TrainerState(global_step=0, max_steps=0, epoch=0.0)


class Evaluator:
    """Samples completions of every held-out prompt and reports means over all of them.

    Each prompt is sampled with its own seed, so that the completions depend on neither the number of ranks nor
    the batch size. The random state of the process is restored afterwards.

    Args:
        sampling: the run's settings, which the evaluation's own override.
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
        """Return the metrics of one evaluation, over all ranks; a collective."""
        return self.metrics(*self.sample(state))

    def sample(
        self, state: TrainerState, done: Callable[[int], None] = lambda prompts: None
    ) -> tuple[list[ScoredRow], Logged]:
        """Return the scored completions, prompt by prompt, and the values that functions logged; a collective.

        Args:
            done: called after each batch with the number of finished prompts.
        """
        rows: list[ScoredRow] = []
        logs: list[tuple[Logged, int]] = []
        per_batch = self.config.batch_size * self.sampler.world.size
        with preserve_random_state():
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
        """Compute the metrics of a result of `sample`."""
        metrics, renamed = with_logged(evaluation_metrics(rows, self.scorer.rewards, self.config), logged)
        if self.sampler.world.is_main:
            self.scorer.warn.all({what: what for what in renamed})
        return metrics

    def _seed(self, state: TrainerState, index: int) -> int:
        """Return the seed of the completions of the prompt at `index`, after the steps of `state`."""
        entropy = [self.sampler.seed, STREAM, state.global_step, index]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def evaluation_metrics(
    rows: Sequence[ScoredRow], rewards: Sequence[NamedReward], config: EvaluationConfig
) -> dict[str, float]:
    """Compute means and standard deviations over all completions, and pass@k over prompts.

    Args:
        rows: `num_generations` completions of each prompt, prompt by prompt.
        rewards: the K functions that scored `rows`.
    """
    labels = [reward.label for reward in rewards]
    columns = [[score for row in rows if (score := row.rewards[i]) is not None] for i in range(len(labels))]
    place = labels.index(config.accuracy or labels[0])
    metrics = {"accuracy": mean(columns[place]) if columns[place] else math.nan}
    counts = []  # for each prompt: scored completions, right ones
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
    """Return the weighted sum of each row, f64[N]; NaN where every function abstained."""
    values = [[math.nan if value is None else value for value in row.rewards] for row in rows]
    weights = torch.tensor([reward.weight for reward in rewards])
    return weighted_sum(torch.tensor(values).reshape(len(rows), len(rewards)), weights)


def _spread(mean_name: str, std_name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean and standard deviation, the latter over n - 1 as in training; empty without values."""
    if not values:
        return {}
    std = float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0
    return {mean_name: mean(values), std_name: std}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the share of the C(n, k) choices of k completions that hold a right one.

    Integers are divided once, so that nothing overflows or cancels: the result is the nearest float.

    Args:
        n: completions of the prompt, at least k.
        c: right completions.
        k: at least 1.

    Raises:
        ValueError: the numbers do not fit together.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} completions, {c} of them right")
    choices = comb(n, k)
    return (choices - comb(n - c, k)) / choices


def mean_pass_at_k(prompts: Sequence[tuple[int, int]], k: int) -> float:
    """Return the mean over `prompts`, each (n, c), without those with fewer than k completions.

    Returns:
        NaN if no prompt has k completions.
    """
    chances = [pass_at_k(n, c, k) for n, c in prompts if n >= k]
    return sum(chances) / len(chances) if chances else math.nan


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation, on every rank."""

    metrics: dict[str, float]
    completions: list[ScoredRollout]
    """Completions, prompt by prompt; `group_id` is the prompt's row in the data."""
    prompts: int
    ranks: int
    main: bool
    """True on the rank that prints the result."""


def evaluate_model(run: ResolvedRun, checkpoint: Path | None, done: Callable[[int, int], None]) -> Evaluated:
    """Evaluate a model as a run evaluates it before its first step; a collective of all ranks.

    Args:
        run: as `grpox.training.load_evaluation` reads it.
        checkpoint: a checkpoint whose weights replace those of `model.path`.
        done: called on the main rank with the numbers of finished and of all prompts.

    Raises:
        ConfigError: an input cannot be used, or the generator or a reward function cannot be built.
        RunFailed: sampling or scoring failed.
    """
    evaluation = run.config.evaluation
    assert evaluation is not None
    quieten()
    world = start_world(run.config.watchdog.end_after + 2 * GRACE)
    seed_libraries(run.config.train.seed)
    key = OF_TRAINING if evaluation.rewards is None else OF_EVALUATION
    with reward_functions(run, key) as functions, translate_exits(FOREIGN):
        times, tokenizer = PhaseTimes(generator=generator_settings(run)), open_tokenizer(run)
        prompts = open_evaluation_prompts(run, tokenizer, evaluation)
        inputs, count = EvaluationInputs.bind(run.config, prompts, functions), len(prompts)
        generator = open_generator(run, world)

        def load() -> PreTrainedModel:
            if checkpoint is None:
                model = load_model(run.config.model)
            else:
                # Imported here, because it imports DeepSpeed.
                from grpox.checkpoint.export import checkpoint_model

                model = checkpoint_model(checkpoint, run.config.model)
            return model.eval().requires_grad_(False).to(world.device)

        with translate_lost_ranks(world, times):
            model = on_every_rank(world, times, times.phase("load")(load))
            allow_tf32(model, world.device)
            context = generator_context(model, tokenizer, run.config, world)
            sampler = start_sampler(generator, context, FixedPolicy(model), world, times, sleeps=False)
            try:
                scorer = Scorer(inputs.rewards, provides(run, Capability.STREAMING))
                evaluator = Evaluator(sampler, scorer, prompts, evaluation, run.config.sampling)
                tell = (lambda number: done(number, count)) if world.is_main else (lambda number: None)
                rows, logged = evaluator.sample(BEFORE_TRAINING, tell)
            finally:
                generator.close()
            metrics = evaluator.metrics(rows, logged)
        completions = _completions(rows, inputs, evaluation.num_generations)
        return Evaluated(metrics, completions, count, world.size, world.is_main)


def _completions(rows: Sequence[ScoredRow], inputs: EvaluationInputs, size: int) -> list[ScoredRollout]:
    """Return the rows in the form of a run's completions, with NaN as advantage."""
    labels = [reward.label for reward in inputs.rewards]
    totals = totals_of(rows, inputs.rewards).tolist()
    return [
        ScoredRollout(
            rollout=replace(row.rollout, group_id=place // size),
            prompt=inputs.prompts.text(place // size),
            completion=row.completion,
            rewards=dict(zip(labels, row.rewards, strict=True)),
            reward=total,
            advantage=math.nan,
            extra=row.extra,
        )
        for place, (row, total) in enumerate(zip(rows, totals, strict=True))
    ]
