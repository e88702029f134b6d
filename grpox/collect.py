"""One generation batch: prompts -> rollouts -> rewards[N, K] -> advantages[N], over all ranks.

Whole groups are dealt to the ranks, each of which samples and scores its own; then every rank holds all N
rollouts in row order (row = group * G + sample), so that the order of completion changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from grpox.agreement import gathered, on_every_rank
from grpox.ahead import Begun
from grpox.arrivals import ArrivingGroups, check_rollouts, incomplete
from grpox.batch_metrics import error_metrics, length_metrics, mean, reward_metrics
from grpox.component_call import call
from grpox.config import SamplingConfig
from grpox.contracts import AdvantageScaler, Generator, Prompt, Rollout, ScoredRollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.early_scoring import EarlyScoring, need_main_thread
from grpox.engine import Engine
from grpox.errors import RunFailed
from grpox.metrics import PhaseTimes
from grpox.reward_sum import weighted_sum
from grpox.rewards import NamedReward
from grpox.rewards.log import mean_logged
from grpox.scored_rows import ScoredRow, ScoredRows, Unscored, score_rows, unscored
from grpox.tell_once import TellOnce
from grpox.world import World

STREAMING = "streaming"
"""What a generator provides that yields each rollout as its completion ends, while others go on."""


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
        streaming: whether the generator provides `STREAMING`. Groups are then scored while others are
            generated, in calls of one or more whole groups; otherwise all groups of a rank in one call, when
            the last completion has ended.
        times: knows of every phase; default: one of its own.
    """

    def __init__(
        self,
        engine: Engine,
        generator: Generator,
        rewards: Sequence[NamedReward],
        world: World,
        seed: int,
        streaming: bool = False,
        times: PhaseTimes | None = None,
    ) -> None:
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

    def _bring_weights(self) -> None:
        weights = self.engine.weights()
        with self.times.phase("sync"):
            try:
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
    ) -> tuple[list[ScoredRow], dict[str, dict[str, float]]]:
        """Sample and score `num_samples` completions of each prompt.

        Args:
            indices: dataset indices of the prompts; group g is that of indices[g].
            stream: tells this call's random stream from every other's, together with seed and rank.
            begun: what `begin` made of the same arguments, if it was called; its samples are then taken.

        Returns:
            the rows of all ranks in row order, and the metrics that reward functions logged: name -> label of
            the function -> mean over calls and ranks.
        """
        if begun is None:
            self.sync()
        share = self._share(prompts, indices, num_samples, sampling, stream)
        as_given = partial(unscored, prompts, indices)
        work = partial(self._sample_mine, share, as_given, state, begun)
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
        with self.times.phase("generate"):
            if not hasattr(self.generator, "begin"):
                raise RunFailed("the generator says that it samples ahead, and has no method 'begin'")
            self.generator.wake()
            arriving = self.generator.begin(share.requests, share.sampling, share.seed)
            return Begun(self.engine.steps, arriving)

    def _share(
        self,
        prompts: PromptSet,
        indices: Sequence[int],
        num_samples: int,
        sampling: SamplingConfig,
        stream: tuple[int, ...],
    ) -> Share:
        mine = range(self.world.rank, len(indices), self.world.size)
        requests = [Prompt(group, prompts.token_ids(indices[group]), num_samples) for group in mine]
        seed = int(np.random.SeedSequence([self.seed, *stream, self.world.rank]).generate_state(1)[0])
        return Share(requests, sampling, seed)

    def _sample_mine(
        self,
        share: Share,
        as_given: Callable[[Sequence[Rollout]], Unscored],
        state: TrainerState,
        begun: Begun | None,
    ) -> ScoredRows:
        """This rank's groups, sampled and scored."""
        now = self.engine.steps
        versions = range(now if begun is None else begun.version, now + 1)
        early = self._early_scoring(share.requests, versions, as_given, state)
        with early or nullcontext():
            with self.times.phase("generate"):
                rollouts = self._generate(share, early) if begun is None else self._take(share, early, begun)
                self.generator.sleep()
                rollouts.sort(key=lambda rollout: (rollout.group_id, rollout.sample))
                check_rollouts(rollouts, share.requests, versions)
            with self.times.phase("reward"):
                scored = early.result() if early else None
                if scored is None:
                    scored = score_rows(self.rewards, as_given(rollouts), state) if rollouts else ScoredRows()
        return scored

    def _early_scoring(
        self,
        requests: Sequence[Prompt],
        versions: range,
        as_given: Callable[[Sequence[Rollout]], Unscored],
        state: TrainerState,
    ) -> EarlyScoring | None:
        """None where all is scored at the end."""
        # A call for each single completion would cost more than it hides: an evaluation is scored at the end.
        single = all(request.num_samples == 1 for request in requests)
        if not self.streaming or single or need_main_thread(self.rewards):
            return None
        return EarlyScoring(self.rewards, ArrivingGroups(requests, versions), as_given, state)

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
        arriving = self.generator.generate(share.requests, share.sampling, share.seed)
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
        return rows, mean_logged(part.logged for part in parts)


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
    ) -> None:
        """
        Args:
            ahead: whether batches may be begun before they are collected; how old they are is then measured.
        """
        self.sampler = sampler
        self.prompts = prompts
        self.scaler = scaler
        self.sampling = sampling
        self.num_generations = num_generations
        self.ahead = ahead

    def begin(self, generation: int, indices: Sequence[int]) -> Begun:
        """Begin to sample generation batch `generation` for the prompts at `indices`; a collective."""
        return self.sampler.begin(self.prompts, indices, self.num_generations, self.sampling, (0, generation))

    def collect(
        self, generation: int, indices: Sequence[int], state: TrainerState, begun: Begun | None = None
    ) -> GenerationBatch:
        """Sample, score and scale generation batch `generation` for the prompts at `indices`.

        Args:
            begun: what `begin` gave for it, if it was begun.
        """
        rows, logged = self.sampler.sample(
            self.prompts, indices, self.num_generations, self.sampling, (0, generation), state, begun
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
        if self.ahead:
            now = self.sampler.engine.steps
            metrics["sampling/staleness"] = mean([now - row.rollout.policy_version for row in rows])
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
