"""Evaluation on held-out prompts: greedy by default, scored by the run's reward functions or by its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from grpox.checkpoint.rng import random_numbers_kept
from grpox.config import EvaluationConfig, SamplingConfig
from grpox.config.evaluation import sampling_of
from grpox.contracts import TrainerState
from grpox.data.prompts import PromptSet
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.log import Logged, weighed_mean_logged, with_logged
from grpox.rollout.sampler import Sampler
from grpox.rollout.scored import ScoredRow
from grpox.training.evaluation_metrics import evaluation_metrics

STREAM = 1
"""Tells the random numbers of evaluations from those of training, whose number is 0."""


class Evaluator:
    """Samples completions of every held-out prompt and reports means over all of them.

    Each prompt is drawn with a seed of its own, so that neither the number of ranks nor the size of a batch
    changes what is sampled; and the random numbers of the process are afterwards what they were.

    Args:
        sampling: the run's; the evaluation's own settings are put over it.
        rewards: default: those of `sampler`.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: PromptSet,
        config: EvaluationConfig,
        sampling: SamplingConfig,
        rewards: Sequence[NamedReward] | None = None,
    ) -> None:
        self.sampler = sampler
        self.prompts = prompts
        self.config = config
        self.sampling = sampling_of(config, sampling)
        self.rewards = sampler.rewards if rewards is None else rewards

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
                scored, logged = self.sampler.sample(
                    self.prompts,
                    indices,
                    self.config.num_generations,
                    self.sampling,
                    (STREAM, state.global_step, start),
                    state,
                    rewards=self.rewards,
                    seeds=[self._seed(state, index) for index in indices],
                )
                rows += scored
                logs.append((logged, len(scored)))
                done(indices.stop)
        return rows, weighed_mean_logged(logs)

    def metrics(self, rows: Sequence[ScoredRow], logged: Logged) -> dict[str, float]:
        """The metrics of what `sample` gave."""
        metrics, renamed = with_logged(evaluation_metrics(rows, self.rewards, self.config), logged)
        if self.sampler.world.is_main:
            self.sampler.warn.all({what: what for what in renamed})
        return metrics

    def _seed(self, state: TrainerState, index: int) -> int:
        """Of the draws for the prompt at `index`, after so many steps."""
        entropy = [self.sampler.seed, STREAM, state.global_step, index]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])
