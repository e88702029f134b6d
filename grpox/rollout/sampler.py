"""One generation batch: prompts -> rollouts -> rewards[N, K] -> advantages[N], over all ranks.

Whole groups are dealt to the ranks, each of which samples and scores its own; then every rank holds all N
rollouts in row order (row = group * G + sample), so that the order of completion changes nothing. The weights
that are sampled with come from the engine in training, from a loaded model where nothing trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from grpox.config import SamplingConfig
from grpox.contracts import AdvantageScaler, Generator, Prompt, Rollout, ScoredRollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.errors import RunFailed
from grpox.errors.warn_once import TellOnce
from grpox.plugins.component import call, exits_told
from grpox.policy.buffers import persistent_buffers
from grpox.rollout.dynamic_sampling import Draw, Refilled, SampledGroups, refill
from grpox.rollout.metrics import are_flat, error_metrics, length_metrics, mean, reward_metrics
from grpox.rollout.prefetch import Begun
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.log import weighed_mean_logged
from grpox.rollout.rewards.weighted_sum import weighted_sum
from grpox.rollout.scored import ScoredRow, ScoredRows, Unscored, score_rows, unscored
from grpox.rollout.streaming_scorer import EarlyScoring, need_main_thread
from grpox.rollout.validation import ArrivingGroups, check_rollouts, incomplete
from grpox.runtime.collective_errors import gathered, on_every_rank
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpox.contracts import WeightStream


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


@dataclass(frozen=True)
class Share:
    """What this rank samples of a batch."""

    requests: Sequence[Prompt]
    """In order of group."""
    sampling: SamplingConfig
    seed: int


class Sampler:
    """Samples from the current policy and scores, on all ranks: for training and for evaluation.

    Args:
        streaming: whether the generator provides `Capability.STREAMING`. Groups are then scored while others
            are generated, in calls of one or more whole groups; otherwise all groups of a rank in one call,
            when the last completion has ended.
        times: knows of every phase; default: one of its own.
        rests: whether the generator sleeps between two calls, since others need its memory meanwhile.
    """

    def __init__(
        self,
        engine: PolicyWeights,
        generator: Generator,
        rewards: Sequence[NamedReward],
        world: World,
        seed: int,
        streaming: bool = False,
        times: PhaseTimes | None = None,
        rests: bool = True,
    ) -> None:
        self.rests = rests
        self.engine = engine
        self.generator = generator
        self.rewards = rewards
        self.world = world
        self.seed = seed
        self.streaming = streaming
        self.times = times or PhaseTimes()
        self.warn = TellOnce()
        self.synced_version: int | None = None

    def sync(self) -> None:
        """Bring the generator to the current weights, if it is not there yet; a collective."""
        if self.synced_version != self.engine.steps:
            gathered(self.world, self.times, self._bring_weights)
            self.synced_version = self.engine.steps

    def _asking(self) -> AbstractContextManager[None]:
        return exits_told(f"generator '{type(self.generator).__name__}'")

    def _bring_weights(self) -> None:
        weights = self.engine.weights()
        with self.times.phase("sync"):
            try:
                with self._asking():
                    self.generator.sync(weights, self.engine.steps)
            except Exception:
                for _ in weights:  # the other ranks are still gathering them
                    pass
                raise

    def sample(
        self,
        prompts: PromptSet,
        indices: Sequence[int],
        num_samples: int,
        sampling: SamplingConfig,
        stream: tuple[int, ...],
        state: TrainerState,
        begun: Begun | None = None,
        *,
        rewards: Sequence[NamedReward] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> tuple[list[ScoredRow], dict[str, dict[str, float]]]:
        """Sample and score `num_samples` completions of each prompt.

        Args:
            indices: dataset indices of the prompts; group g is that of indices[g].
            stream: tells this call's random stream from every other's, together with seed and rank.
            begun: what `begin` made of the same arguments, if it was called; its samples are then taken.
            rewards: what scores; default: the reward functions of training.
            seeds: of each prompt's own draws; default: they follow from `stream` and the rank.

        Returns:
            the rows of all ranks in row order, and the metrics that reward functions logged: name -> label of
            the function -> mean over completions.
        """
        if begun is None:
            self.sync()
        share = self._share(prompts, indices, num_samples, sampling, stream, seeds)
        as_given = partial(unscored, prompts, indices)
        scored_by = self.rewards if rewards is None else rewards
        work = partial(self._sample_mine, share, as_given, scored_by, state, begun)
        return self._merged(gathered(self.world, self.times, work))

    def begin(
        self,
        prompts: PromptSet,
        indices: Sequence[int],
        num_samples: int,
        sampling: SamplingConfig,
        stream: tuple[int, ...],
    ) -> Begun:
        """Begin what `sample` does with the same arguments, by a generator that samples ahead; a collective.

        The samples are of the weights of now, and are drawn as `sample` would draw them now.
        """
        self.sync()
        share = self._share(prompts, indices, num_samples, sampling, stream)
        return on_every_rank(self.world, self.times, partial(self._begin_mine, share))

    def _begin_mine(self, share: Share) -> Begun:
        with self._asking(), self.times.phase("generate"):
            if not hasattr(self.generator, "begin"):
                raise RunFailed("the generator says that it samples ahead, and has no method 'begin'")
            self.generator.wake()
            arriving = self.generator.begin(list(share.requests), share.sampling, share.seed)
            return Begun(self.engine.steps, arriving)

    def _share(
        self,
        prompts: PromptSet,
        indices: Sequence[int],
        num_samples: int,
        sampling: SamplingConfig,
        stream: tuple[int, ...],
        seeds: Sequence[int] | None = None,
    ) -> Share:
        mine = range(self.world.rank, len(indices), self.world.size)
        requests = [
            Prompt(group, prompts.token_ids(indices[group]), num_samples, seeds[group] if seeds else None)
            for group in mine
        ]
        seed = int(np.random.SeedSequence([self.seed, *stream, self.world.rank]).generate_state(1)[0])
        return Share(requests, sampling, seed)

    def _sample_mine(
        self,
        share: Share,
        as_given: Callable[[Sequence[Rollout]], Unscored],
        rewards: Sequence[NamedReward],
        state: TrainerState,
        begun: Begun | None,
    ) -> ScoredRows:
        """This rank's groups, sampled and scored."""
        now = self.engine.steps
        versions = range(now if begun is None else begun.version, now + 1)
        early = self._early_scoring(share.requests, versions, as_given, rewards, state)
        with early or nullcontext():
            with self._asking(), self.times.phase("generate"):
                rollouts = self._generate(share, early) if begun is None else self._take(share, early, begun)
                if self.rests:
                    self.generator.sleep()
                rollouts.sort(key=lambda rollout: (rollout.group_id, rollout.sample))
                check_rollouts(rollouts, share.requests, versions)
            with self.times.phase("reward"):
                scored = early.result() if early else None
                if scored is None:
                    scored = score_rows(rewards, as_given(rollouts), state) if rollouts else ScoredRows()
        return scored

    def _early_scoring(
        self,
        requests: Sequence[Prompt],
        versions: range,
        as_given: Callable[[Sequence[Rollout]], Unscored],
        rewards: Sequence[NamedReward],
        state: TrainerState,
    ) -> EarlyScoring | None:
        """None where all is scored at the end."""
        # A call for each single completion would cost more than it hides: it is scored at the end.
        single = all(request.num_samples == 1 for request in requests)
        if not self.streaming or single or need_main_thread(rewards):
            return None
        return EarlyScoring(rewards, ArrivingGroups(requests, versions), as_given, state)

    def _take(self, share: Share, early: EarlyScoring | None, begun: Begun) -> list[Rollout]:
        """This rank's rollouts of a batch that was begun, in any order; a collective.

        What the generator left out, on any rank, is drawn now with the weights of now: whole groups, of which
        the samples that are there already stay as they are.
        """
        # Where reading fails on one rank, none goes on to the collectives below.
        rollouts = on_every_rank(self.world, self.times, partial(_read, begun, early))
        wanted = incomplete(share.requests, rollouts)
        if any(self.world.gather([bool(wanted)])):
            self.sync()
            came = {(rollout.group_id, rollout.sample) for rollout in rollouts}
            rollouts += self._generate(replace(share, requests=wanted), early, came)
        return rollouts

    def _generate(
        self, share: Share, early: EarlyScoring | None, came: Container[tuple[int, int]] = ()
    ) -> list[Rollout]:
        """This rank's rollouts in any order; `early` is told of each as it arrives.

        Args:
            came: group and sample of those that are there already: drawn again, they are left out.
        """
        rollouts = []
        self.generator.wake()
        # A list of its own: what was asked for is looked at again when all has come.
        arriving = self.generator.generate(list(share.requests), share.sampling, share.seed)
        with ExitStack() as stack:
            if hasattr(arriving, "close"):  # a failure while it is suspended ends its requests here and now
                stack.callback(arriving.close)
            for rollout in arriving:
                if (rollout.group_id, rollout.sample) in came:
                    continue
                if early is not None:
                    early.arrived(rollout)
                rollouts.append(rollout)
        return rollouts

    def _merged(self, parts: Sequence[ScoredRows]) -> tuple[list[ScoredRow], dict[str, dict[str, float]]]:
        """The rows of all ranks in row order, and what the reward functions logged; their warnings are told."""
        rows = sorted(
            (row for part in parts for row in part.rows),
            key=lambda row: (row.rollout.group_id, row.rollout.sample),
        )
        if self.world.is_main:
            for part in parts:
                self.warn.all(part.warnings)
        return rows, weighed_mean_logged((part.logged, len(part.rows)) for part in parts)


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


def _read(begun: Begun, early: EarlyScoring | None) -> list[Rollout]:
    """What was begun, once it is in; `early` is told of each as it arrives."""
    rollouts = []
    for rollout in begun:
        if early is not None:
            early.arrived(rollout)
        rollouts.append(rollout)
    return rollouts


def reward_matrix(rows: Sequence[ScoredRow]) -> torch.Tensor:
    """f32[N, K], NaN where a function abstained."""
    return torch.tensor([[math.nan if r is None else r for r in row.rewards] for row in rows])


class PolicyWeights(Protocol):
    """The weights that are to be sampled from, as they are now."""

    @property
    def steps(self) -> int:
        """Optimizer steps that they have taken: their version."""
        ...

    def weights(self) -> WeightStream:
        """All of them, whole; a collective."""
        ...


class FixedPolicy:
    """A whole model that nothing trains, on every rank."""

    steps = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.module = model

    def weights(self) -> WeightStream:
        """Every parameter under its name, tied ones once, and the persistent buffers."""
        for name, tensor in chain(self.module.named_parameters(), persistent_buffers(self.module)):
            yield name, tensor.detach()
