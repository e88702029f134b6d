"""Evaluation on held-out prompts: greedy by default, scored by the run's reward functions or by its own.

pass@k is the chance that at least one of k completions is right, estimated without bias from n of them. Chen et
al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), equation 1:
pass@k = E over prompts of 1 - C(n - c, k) / C(n, k), where c of n completions are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from math import comb

import numpy as np
import torch

from grpox.checkpoint.rng import random_numbers_kept
from grpox.config import EvaluationConfig, SamplingConfig
from grpox.config.sampling import sampling_of
from grpox.contracts import TrainerState
from grpox.data.prompts import PromptSet
from grpox.rollout.collector import Scorer, sample_and_score
from grpox.rollout.metrics import error_metrics, length_metrics, mean
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import Logged, ScoredRow, weighed_mean_logged, weighted_sum, with_logged
from grpox.rollout.sampler import CompletionSampler, SampleRequest

STREAM = 1
"""Tells the random numbers of evaluations from those of training, whose number is 0."""


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
    accuracy = labels.index(config.accuracy or labels[0])
    columns = [_given([row.rewards[place] for row in rows]) for place in range(len(labels))]
    metrics = {"accuracy": mean(columns[accuracy]) if columns[accuracy] else math.nan}
    metrics |= _pass_at_k(rows, accuracy, config)
    metrics |= _spread("reward", "reward_std", _given(_totals(rows, rewards)))
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


def _totals(rows: Sequence[ScoredRow], rewards: Sequence[NamedReward]) -> list[float | None]:
    return [None if math.isnan(total) else total for total in totals_of(rows, rewards).tolist()]


def _given(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(mean_name: str, std_name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation, the latter over n - 1 as in training; nothing where there are no values."""
    if not values:
        return {}
    std = float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0
    return {mean_name: mean(values), std_name: std}


def _pass_at_k(rows: Sequence[ScoredRow], place: int, config: EvaluationConfig) -> dict[str, float]:
    prompts = list(_counted(rows, place, config))
    found = {f"pass_at_{k}": mean_pass_at_k(prompts, k) for k in config.pass_at_k}
    return {name: math.nan if value is None else value for name, value in found.items()}


def _counted(rows: Sequence[ScoredRow], place: int, config: EvaluationConfig) -> Iterator[tuple[int, int]]:
    """(completions that have a score, those that are right) of each prompt."""
    size = config.num_generations
    for start in range(0, len(rows), size):
        scores = _given([row.rewards[place] for row in rows[start : start + size]])
        yield len(scores), sum(score >= config.right_at for score in scores)


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


def mean_pass_at_k(prompts: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean over `prompts`, (n, c) of each; those with fewer than k completions are left out.

    Returns:
        None where none is left.
    """
    found = [pass_at_k(n, c, k) for n, c in prompts if n >= k]
    return sum(found) / len(found) if found else None
