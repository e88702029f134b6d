"""One generation batch: sampled and scored groups -> rewards [N, K] -> advantages [N], over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from grpox.config import SamplingConfig
from grpox.contracts import AdvantageScaler, Rollout, ScoredRollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.errors import RunFailed
from grpox.plugins.component import call
from grpox.rollout.dynamic_sampling import Draw, Refilled, SampledGroups, refill
from grpox.rollout.metrics import are_flat, error_metrics, length_metrics, mean, reward_metrics
from grpox.rollout.prefetch import Begun
from grpox.rollout.rewards.weighted_sum import weighted_sum
from grpox.rollout.sampler import Sampler
from grpox.rollout.scored import ScoredRow

if TYPE_CHECKING:
    pass


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
    dropped: Sequence[ScoredRow] = ()
    """Completions that were sampled for it and replaced."""

    @cached_property
    def rollouts(self) -> list[Rollout]:
        return [row.rollout for row in self.rows]

    @property
    def version(self) -> int:
        """Optimizer steps of the weights that sampled this batch, the oldest where there are several."""
        return min(row.rollout.policy_version for row in self.rows)


class Collector:
    """Makes generation batches for training."""

    def __init__(
        self,
        sampler: Sampler,
        prompts: PromptSet,
        scaler: AdvantageScaler,
        sampling: SamplingConfig,
        num_generations: int,
        ahead: bool = False,
        rounds: int = 0,
    ) -> None:
        """
        Args:
            ahead: whether batches may be begun before they are collected; how old they are is then measured.
            rounds: of dynamic sampling, after the first.
        """
        self.sampler = sampler
        self.prompts = prompts
        self.scaler = scaler
        self.sampling = sampling
        self.num_generations = num_generations
        self.ahead = ahead
        self.rounds = rounds

    def begin(self, generation: int, indices: Sequence[int]) -> Begun:
        """Begin to sample generation batch `generation` for the prompts at `indices`; a collective."""
        return self.sampler.begin(self.prompts, indices, self.num_generations, self.sampling, (0, generation))

    def collect(
        self,
        generation: int,
        indices: Sequence[int],
        state: TrainerState,
        begun: Begun | None = None,
        draw: Draw | None = None,
    ) -> GenerationBatch:
        """Sample, score and scale generation batch `generation` for the prompts at `indices`.

        Args:
            begun: what `begin` gave for it, if it was begun.
            draw: gives the prompts of further groups, where groups that teach nothing are to be replaced.
        """
        rows, logged = self.sampler.sample(
            self.prompts, indices, self.num_generations, self.sampling, (0, generation), state, begun
        )
        refilled = self._refilled(generation, SampledGroups.of(indices, rows, logged), state, draw)
        rows, dropped = refilled.batch.rows, refilled.dropped
        rewards = reward_matrix(rows)
        group_ids = torch.tensor([row.rollout.group_id for row in rows])
        advantages = self._advantages(rewards, self._weights, group_ids)
        totals = self._totals(rows)
        labels = [reward.label for reward in self.sampler.rewards]
        metrics = {
            **reward_metrics(labels, rewards, totals, self.num_generations),
            # Of all that was scored: a group for which a function fails altogether is replaced.
            **error_metrics(self.sampler.rewards, [row.failed for row in (*rows, *dropped)]),
            **length_metrics([row.rollout for row in rows]),
            **refilled.metrics,
        }
        if self.ahead:
            now = self.sampler.engine.steps
            metrics["sampling/staleness"] = mean([now - row.rollout.policy_version for row in rows])
        if self.sampler.world.is_main and bool(totals.isnan().all()):
            self.sampler.warn(
                "nothing scored",
                f"no completion of generation batch {generation} has a reward, because every reward function "
                f"({', '.join(labels)}) abstained for all of them: the batch teaches nothing",
            )
        batch = refilled.batch
        told = {name: dict(by_label) for name, by_label in batch.logged.items()}
        return GenerationBatch(batch.indices, rows, rewards, totals, advantages, metrics, told, dropped)

    def _refilled(
        self, generation: int, first: SampledGroups, state: TrainerState, draw: Draw | None
    ) -> Refilled:
        """The batch with its flat groups replaced, where they are to be; a collective."""
        if draw is None:
            return Refilled(first, (), {})

        def sample(number: int, indices: Sequence[int]) -> SampledGroups:
            stream = (2, generation, number)
            rows, logged = self.sampler.sample(
                self.prompts, indices, self.num_generations, self.sampling, stream, state
            )
            return SampledGroups.of(indices, rows, logged)

        refilled = refill(first, self.rounds, draw, sample, self._is_flat)
        totals = self._totals(first.rows)
        if bool(totals.isnan().all()):
            return refilled
        # What is replaced is what is too easy or too hard: the reward of the batch no longer tells of progress.
        told = {"dynamic_sampling/first_reward": float(totals.nanmean())}
        return replace(refilled, metrics={**refilled.metrics, **told})

    def _is_flat(self, group: Sequence[ScoredRow]) -> bool:
        return bool(are_flat(self._totals(group).unsqueeze(0)))

    @property
    def _weights(self) -> torch.Tensor:
        """f32[K]"""
        return torch.tensor([reward.weight for reward in self.sampler.rewards])

    def _totals(self, rows: Sequence[ScoredRow]) -> torch.Tensor:
        """f32[N]: the weighted sum of each row, NaN where all abstained."""
        return weighted_sum(reward_matrix(rows), self._weights).float()

    def _advantages(
        self, rewards: torch.Tensor, weights: torch.Tensor, group_ids: torch.Tensor
    ) -> torch.Tensor:
        """f32[N] by the run's scaler; anything else than N finite numbers would be trained on in silence."""
        # The metrics are made of the rewards, whatever the scaler does with its own.
        made = call("advantage", self.scaler.scale, rewards.clone(), weights, group_ids)
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
        texts = self.prompts.texts(batch.indices)
        numbers = zip(batch.rows, batch.totals.tolist(), batch.advantages.tolist(), strict=True)
        return [
            ScoredRollout(
                rollout=row.rollout,
                prompt=texts[row.rollout.group_id],
                completion=row.completion,
                rewards=dict(zip(labels, row.rewards, strict=True)),
                reward=total,
                advantage=advantage,
                extra=row.extra,
            )
            for row, total, advantage in numbers
        ]


def reward_matrix(rows: Sequence[ScoredRow]) -> torch.Tensor:
    """f32[N, K], NaN where a function abstained."""
    return torch.tensor([[math.nan if r is None else r for r in row.rewards] for row in rows])
