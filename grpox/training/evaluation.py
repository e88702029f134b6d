"""Evaluation on held-out prompts: greedy by default, scored by the run's reward functions or by its own.

It is part of a run, or `evaluate_model` does it alone.

pass@k is the chance that at least one of k completions is right, estimated without bias from n of them. Chen et
al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), equation 1:
pass@k = E over prompts of 1 - C(n - c, k) / C(n, k), where c of n completions are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from grpox.checkpoint.rng import preserve_random_state
from grpox.config import EvaluationConfig, SamplingConfig
from grpox.config.sampling import sampling_of
from grpox.contracts import Capability, ScoredRollout, TrainerState
from grpox.rollout.collector import Scorer, sample_and_score
from grpox.rollout.metrics import (
    INFO,
    SUCCESS,
    SUCCESS_RATE,
    episode_metrics,
    error_metrics,
    length_metrics,
    mean,
)
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import Logged, weighed_mean_logged, with_logged
from grpox.rollout.sampler import CompletionSampler, SampleRequest
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.training.assembly import EvaluationInputs, open_alone
from grpox.training.inputs import open_evaluation_prompts, provides, scoring_key

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun


STREAM = 1
"""Seed component that separates random numbers of evaluations from those of training (0)."""

Sampled = tuple[list[ScoredRollout], Logged]
"""Scored completions, prompt by prompt, and the values that functions logged."""


@dataclass
class Evaluation:
    """Samples completions of the held-out prompts, set by set, and reports means over all of them.

    Each prompt is sampled with its own seed, so that the completions depend on neither the number of ranks nor
    the batch size. The random state of the process is restored afterwards.

    Args:
        sets: the only set has an empty name.
        sampling: the run's settings, which the evaluation's own override.
        streams: True if the generator provides `Capability.STREAMING`.
    """

    sampler: CompletionSampler
    sets: Sequence[EvaluationInputs]
    config: EvaluationConfig
    sampling: SamplingConfig
    streams: bool
    warn: WarnOnce

    def is_due(self, step: int, total_steps: int) -> bool:
        """Return True if an evaluation is due after `step`; after the last step it always is."""
        return step == total_steps or (self.config.every > 0 and step % self.config.every == 0)

    def evaluate(self, state: TrainerState) -> dict[str, float]:
        """Return the metrics of one evaluation, over all ranks; a collective."""
        return self.metrics(self.sample(state))

    def sample(self, state: TrainerState, done: Callable[[int], None] = lambda prompts: None) -> list[Sampled]:
        """Return the completions of each set, in order; a collective.

        Args:
            done: called after each batch with the number of finished prompts of all sets.
        """
        sampled, finished, step = list[Sampled](), 0, state.global_step
        per_batch, sampling = (
            self.config.batch_size * self.sampler.world.size,
            sampling_of(self.config, self.sampling),
        )
        for place, inputs in enumerate(self.sets):
            # The first set has the same seeds as a set alone.
            stream = (STREAM, place, step) if place else (STREAM, step)
            scorer = Scorer(inputs.rewards, self.streams, self.warn)
            rows, logs, count = list[ScoredRollout](), list[tuple[Logged, int]](), len(inputs.prompts)
            with preserve_random_state():
                for start in range(0, count, per_batch):
                    indices = range(start, min(start + per_batch, count))
                    entropies = [[self.sampler.seed, *stream, index] for index in indices]
                    seeds = [int(np.random.SeedSequence(each).generate_state(1)[0]) for each in entropies]
                    samples, draw = self.config.num_generations, (*stream, start)
                    request = SampleRequest(inputs.prompts, indices, samples, sampling, draw, seeds)
                    scored, logged = sample_and_score(self.sampler, scorer, request, state)
                    rows += scored
                    logs.append((logged, len(scored)))
                    done(finished + indices.stop)
            finished += count
            sampled.append((rows, weighed_mean_logged(logs)))
        return sampled

    def metrics(self, sampled: Sequence[Sampled]) -> dict[str, float]:
        """Compute the metrics over the completions of all sets, and of each named set below its name."""
        rows = [row for of_set, _ in sampled for row in of_set]
        logged = weighed_mean_logged((logs, len(of_set)) for of_set, logs in sampled)
        metrics = self._metrics(self.sets[0], rows, logged)
        for inputs, (of_set, logs) in zip(self.sets, sampled, strict=True):
            if inputs.name:
                own = self._metrics(inputs, of_set, logs)
                metrics |= {f"{inputs.name}/{metric}": value for metric, value in own.items()}
        return metrics

    def _metrics(
        self, inputs: EvaluationInputs, rows: Sequence[ScoredRollout], logged: Logged
    ) -> dict[str, float]:
        metrics, renamed = with_logged(evaluation_metrics(rows, inputs.rewards, self.config), logged)
        if not self.config.says_accuracy:  # the scores of the first reward may be anything
            del metrics["accuracy"]
        if self.sampler.world.is_main:
            self.warn.all({what: what for what in renamed})
        return metrics


def open_evaluation(
    run: ResolvedRun, sampler: CompletionSampler, inputs: Sequence[EvaluationInputs], warn: WarnOnce
) -> Evaluation | None:
    """Build the evaluation of a run; None if it has none."""
    config, streams = run.config.evaluation, provides(run, Capability.STREAMING)
    return None if config is None else Evaluation(sampler, inputs, config, run.config.sampling, streams, warn)


def evaluation_metrics(
    rows: Sequence[ScoredRollout], rewards: Sequence[NamedReward], config: EvaluationConfig
) -> dict[str, float]:
    """Compute means and standard deviations over all completions, and pass@k over prompts.

    Args:
        rows: `num_generations` completions of each prompt, prompt by prompt.
        rewards: the K functions that scored `rows`.
    """
    columns = {
        reward.label: [score for row in rows if (score := row.rewards[reward.label]) is not None]
        for reward in rewards
    }
    judge = config.accuracy or rewards[0].label
    metrics = {"accuracy": mean(columns[judge]) if columns[judge] else math.nan}
    counts = []  # for each prompt: scored completions, right ones
    for start in range(0, len(rows), config.num_generations):
        of_prompt = rows[start : start + config.num_generations]
        scores = [score for row in of_prompt if (score := row.rewards[judge]) is not None]
        counts.append((len(scores), sum(score >= config.right_at for score in scores)))
    metrics |= {f"pass_at_{k}": pass_at_k(counts, k) for k in config.pass_at_k}
    metrics |= _spread("reward", "reward_std", [row.reward for row in rows if not math.isnan(row.reward)])
    for label, column in columns.items():
        metrics[f"rewards/{label}/mean"] = math.nan
        metrics |= _spread(f"rewards/{label}/mean", f"rewards/{label}/std", column)
        metrics[f"rewards/{label}/abstained"] = 1 - len(column) / len(rows)
    metrics |= error_metrics(rewards, rows)
    rollouts = [row.rollout for row in rows]
    of_episodes = episode_metrics(rollouts)
    if SUCCESS_RATE in of_episodes:
        metrics[SUCCESS] = of_episodes.pop(SUCCESS_RATE)
    # Names that environments choose replace no other metric.
    return {
        **metrics,
        **length_metrics(rollouts),
        **{name: value for name, value in of_episodes.items() if name not in metrics},
    }


def outcomes_of(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Name the results of the first and the last evaluation for the summary: ``accuracy_before`` and so on.

    These are accuracy, or else the means of rewards, the success of episodes, and other numbers that
    environments report in their info.
    """
    outcomes: dict[str, float] = {}
    for when, metrics in (("before", before), ("after", after)):
        named = {name.removeprefix(INFO): name for name in metrics if name.startswith(INFO)}
        means = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
        main = ["accuracy"] if "accuracy" in metrics else means
        named |= {name: name for name in (*main, SUCCESS) if name in metrics}
        outcomes |= {f"{name}_{when}": metrics[metric] for name, metric in named.items()}
    return outcomes


def _spread(mean_name: str, std_name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean and standard deviation, the latter over n - 1 as in training; empty without values."""
    if not values:
        return {}
    std = float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0
    return {mean_name: mean(values), std_name: std}


def pass_at_k(prompts: Sequence[tuple[int, int]], k: int) -> float:
    """Return the mean over prompts of the share of the C(n, k) choices of k completions with a right one.

    Integers are divided once, so that nothing overflows or cancels: each share is the nearest float.

    Args:
        prompts: for each its n completions and the c right ones. Prompts with n < k are left out.

    Returns:
        NaN if no prompt has k completions.
    """
    chances = [(comb(n, k) - comb(n - c, k)) / comb(n, k) for n, c in prompts if n >= k]
    return sum(chances) / len(chances) if chances else math.nan


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation, on every rank."""

    metrics: dict[str, float]
    completions: list[ScoredRollout]
    """Completions, prompt by prompt; `group_id` is the prompt's row in the data, counted through all sets."""
    prompts: int


def evaluate_model(run: ResolvedRun, checkpoint: Path | None, done: Callable[[int, int], None]) -> Evaluated:
    """Evaluate a model as a run evaluates it before its first step; a collective of all ranks.

    Args:
        run: result of `grpox.training.load_evaluation`.
        checkpoint: a checkpoint whose weights replace those of `model.path`.
        done: called on the main rank with the numbers of finished and of all prompts.

    Raises:
        ConfigError: an input cannot be used, or the generator or a reward function cannot be built.
        RunFailed: sampling or scoring failed.
    """
    with open_alone(run, scoring_key(run)) as assembly:
        inputs = assembly.bind(open_evaluation_prompts(run, assembly.tokenizer, assembly.episodes))
        count, completions = sum(len(each.prompts) for each in inputs), list[ScoredRollout]()
        with assembly.fixed_sampler(checkpoint) as sampler:
            evaluation = open_evaluation(run, sampler, inputs, WarnOnce(get_logger(__name__)))
            assert evaluation is not None
            tell = (lambda number: done(number, count)) if assembly.world.is_main else (lambda number: None)
            sampled = evaluation.sample(TrainerState(global_step=0, max_steps=0, epoch=0.0), tell)
        metrics, size = evaluation.metrics(sampled), evaluation.config.num_generations
        for of_set, (rows, _) in zip(inputs, sampled, strict=True):
            completions += _completions(rows, of_set, size, len(completions) // size)
        return Evaluated(metrics, completions, count)


def _completions(
    rows: Sequence[ScoredRollout], inputs: EvaluationInputs, size: int, before: int
) -> list[ScoredRollout]:
    """Add prompts and columns to the rows, as observers of a run see them.

    Args:
        before: number of prompts of the sets before this one.
    """
    # An environment may continue the prompt of the data.
    known = list(dict.fromkeys(row.rollout.prompt_ids for row in rows if row.rollout.episode is not None))
    begun = dict(zip(known, inputs.prompts.prompt_texts(known) if known else (), strict=True))
    columns = inputs.prompts.columns_of(range(len(inputs.prompts)))
    return [
        replace(
            row,
            rollout=replace(row.rollout, group_id=before + place // size),
            prompt=begun.get(row.rollout.prompt_ids) or inputs.prompts.text(place // size),
            columns=columns[place // size],
        )
        for place, row in enumerate(rows)
    ]
