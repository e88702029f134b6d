"""One generation batch: prompts -> rollouts -> rewards[N, K] -> advantages[N], over all ranks.

Whole groups are dealt to the ranks, each of which samples and scores its own; then every rank holds all N
rollouts in row order (row = group * G + sample), so that the order of completion changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from grpox.batch_metrics import error_metrics, length_metrics, reward_metrics
from grpox.component_call import call
from grpox.config import SamplingConfig
from grpox.contracts import AdvantageScaler, Generator, Prompt, Rollout, ScoredRollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.engine import Engine
from grpox.errors import RunFailed
from grpox.metrics import PhaseTimes
from grpox.reward_sum import weighted_sum
from grpox.rewards import NamedReward, score
from grpox.rewards.log import mean_logged
from grpox.tell_once import TellOnce
from grpox.world import World


@dataclass(frozen=True)
class ScoredRow:
    """One completion with its reward from each function, as it travels between ranks."""

    rollout: Rollout
    rewards: tuple[float | None, ...]
    failed: tuple[bool, ...]
    """Which functions abstained because they failed."""
    extra: dict[str, Any]
    """What the functions told of it through `log_extra`."""


@dataclass(frozen=True)
class GenerationBatch:
    """N rollouts of all ranks in row order, scored."""

    indices: Sequence[int]
    """Dataset index of each group's prompt."""
    rows: Sequence[ScoredRow]
    rewards: torch.Tensor  # f32[N, K], NaN where a function abstained
    totals: torch.Tensor  # f32[N]: weighted sums, NaN where all abstained
    advantages: torch.Tensor  # f32[N]
    metrics: dict[str, float]
    logged: dict[str, dict[str, float]]
    """What reward functions told through `log_metric`: name -> label of the function -> value."""

    @cached_property
    def rollouts(self) -> list[Rollout]:
        return [row.rollout for row in self.rows]

    @property
    def version(self) -> int:
        """Optimizer steps of the weights that sampled this batch."""
        return self.rows[0].rollout.policy_version


class Sampler:
    """Samples from the current policy and scores, on all ranks: for training and for evaluation."""

    def __init__(
        self, engine: Engine, generator: Generator, rewards: Sequence[NamedReward], world: World, seed: int
    ) -> None:
        self.engine = engine
        self.generator = generator
        self.rewards = rewards
        self.world = world
        self.seed = seed
        self.times = PhaseTimes()
        self.warn = TellOnce()
        self.synced_version: int | None = None

    def sync(self) -> None:
        """Bring the generator to the current weights, if it is not there yet; a collective."""
        if self.synced_version != self.engine.steps:
            with self.times.phase("sync"):
                self.generator.sync(self.engine.weights(), self.engine.steps)
            self.synced_version = self.engine.steps

    def sample(
        self,
        prompts: PromptSet,
        indices: Sequence[int],
        num_samples: int,
        sampling: SamplingConfig,
        stream: tuple[int, ...],
        state: TrainerState,
    ) -> tuple[list[ScoredRow], dict[str, dict[str, float]]]:
        """Sample and score `num_samples` completions of each prompt.

        Args:
            indices: dataset indices of the prompts; group g is that of indices[g].
            stream: tells this call's random stream from every other's, together with seed and rank.

        Returns:
            the rows of all ranks in row order, and the metrics that reward functions logged: name -> label of
            the function -> mean over calls and ranks.
        """
        self.sync()
        mine = range(self.world.rank, len(indices), self.world.size)
        requests = [Prompt(group, prompts.token_ids(indices[group]), num_samples) for group in mine]
        seed = int(np.random.SeedSequence([self.seed, *stream, self.world.rank]).generate_state(1)[0])
        with self.times.phase("generate"):
            self.generator.wake()
            rollouts = list(self.generator.generate(requests, sampling, seed))
            self.generator.sleep()
        rollouts.sort(key=lambda rollout: (rollout.group_id, rollout.sample))
        self._check(rollouts, requests)
        with self.times.phase("reward"):
            rows, logged, warnings = self._score(prompts, indices, rollouts, state)
        with self.times.phase("gather"):
            rows = self.world.gather(rows)
            told = self.world.gather([(logged, warnings)])
        rows.sort(key=lambda row: (row.rollout.group_id, row.rollout.sample))
        if self.world.is_main:
            for _, of_rank in told:
                self.warn.all(of_rank)
        return rows, mean_logged(log for log, _ in told)

    def _check(self, rollouts: Sequence[Rollout], requests: Sequence[Prompt]) -> None:
        """Refuse what would train the wrong thing: missing or doubled samples, or those of other weights."""
        expected = [(prompt.group_id, sample) for prompt in requests for sample in range(prompt.num_samples)]
        if [(rollout.group_id, rollout.sample) for rollout in rollouts] != expected:
            raise RunFailed(
                f"the generator returned {len(rollouts)} rollouts that are not the {len(expected)} asked for"
            )
        for rollout in rollouts:
            if rollout.policy_version != self.engine.steps:
                raise RunFailed(
                    f"the generator returned a rollout of policy version {rollout.policy_version}, "
                    f"the policy is at version {self.engine.steps}"
                )

    def _score(
        self, prompts: PromptSet, indices: Sequence[int], rollouts: Sequence[Rollout], state: TrainerState
    ) -> tuple[list[ScoredRow], dict[str, dict[str, float]], dict[str, str]]:
        if not rollouts:
            return [], {}, {}
        prompt_of_each, columns = prompts.rows([indices[rollout.group_id] for rollout in rollouts])
        completion_ids = [list(rollout.completion_ids) for rollout in rollouts]
        table = score(
            self.rewards,
            prompts=prompt_of_each,
            completions=prompts.completions(completion_ids),
            completion_ids=completion_ids,
            columns=columns,
            trainer_state=state,
        )
        rows = []
        for place, rollout in enumerate(rollouts):
            values = tuple(of_function[place] for of_function in table.values)
            failed = tuple(of_function[place] for of_function in table.failed)
            extra = {name: column[place] for name, column in table.extra_columns.items()}
            rows.append(ScoredRow(rollout, values, failed, extra))
        return rows, table.metrics, table.warnings


class Collector:
    """Makes generation batches for training."""

    def __init__(
        self,
        sampler: Sampler,
        prompts: PromptSet,
        scaler: AdvantageScaler,
        sampling: SamplingConfig,
        num_generations: int,
    ) -> None:
        self.sampler = sampler
        self.prompts = prompts
        self.scaler = scaler
        self.sampling = sampling
        self.num_generations = num_generations

    def collect(self, generation: int, indices: Sequence[int], state: TrainerState) -> GenerationBatch:
        """Sample, score and scale generation batch `generation` for the prompts at `indices`."""
        rows, logged = self.sampler.sample(
            self.prompts, indices, self.num_generations, self.sampling, (0, generation), state
        )
        rewards = reward_matrix(rows)
        weights = torch.tensor([reward.weight for reward in self.sampler.rewards])
        group_ids = torch.tensor([row.rollout.group_id for row in rows])
        advantages = self._advantages(rewards, weights, group_ids)
        totals = weighted_sum(rewards, weights).float()
        labels = [reward.label for reward in self.sampler.rewards]
        metrics = {
            **reward_metrics(labels, rewards, totals, self.num_generations),
            **error_metrics(self.sampler.rewards, [row.failed for row in rows]),
            **length_metrics([row.rollout for row in rows]),
        }
        if self.sampler.world.is_main and bool(totals.isnan().all()):
            self.sampler.warn(
                "nothing scored",
                f"no completion of generation batch {generation} has a reward, because every reward function "
                f"({', '.join(labels)}) abstained for all of them: the batch teaches nothing",
            )
        return GenerationBatch(indices, rows, rewards, totals, advantages, metrics, logged)

    def _advantages(
        self, rewards: torch.Tensor, weights: torch.Tensor, group_ids: torch.Tensor
    ) -> torch.Tensor:
        """f32[N] by the run's scaler; anything else than N finite numbers would be trained on in silence."""
        made = call("advantage", self.scaler.scale, rewards, weights, group_ids)
        name, count = type(self.scaler).__name__, len(rewards)
        if not isinstance(made, torch.Tensor) or made.shape != (count,):
            shape = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
            raise RunFailed(f"advantage '{name}' returned {shape}; one number per completion is ({count},)")
        if not bool(made.isfinite().all()):
            raise RunFailed(f"advantage '{name}' returned {made[~made.isfinite()][0]} for a completion")
        return made

    def scored(self, batch: GenerationBatch) -> list[ScoredRollout]:
        """The batch as observers see it, with texts."""
        labels = [reward.label for reward in self.sampler.rewards]
        texts = [self.prompts.text(index) for index in batch.indices]
        completions = self.prompts.completion_texts([row.rollout.completion_ids for row in batch.rows])
        numbers = zip(batch.rows, completions, batch.totals.tolist(), batch.advantages.tolist(), strict=True)
        return [
            ScoredRollout(
                rollout=row.rollout,
                prompt=texts[row.rollout.group_id],
                completion=completion,
                rewards=dict(zip(labels, row.rewards, strict=True)),
                reward=total,
                advantage=advantage,
                extra=row.extra,
            )
            for row, completion, total, advantage in numbers
        ]


def reward_matrix(rows: Sequence[ScoredRow]) -> torch.Tensor:
    """f32[N, K], NaN where a function abstained."""
    return torch.tensor([[math.nan if r is None else r for r in row.rewards] for row in rows])
