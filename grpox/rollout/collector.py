"""One generation batch: sampled and scored groups -> rewards [N, K] -> advantages [N], over all ranks.

Each rank scores the groups that it sampled; then every rank has the rows of all. Row = group * G + sample, so
that the order of completion changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from grpox.config import SamplingConfig
from grpox.config.alarms import EMPTY_TESTS
from grpox.contracts import AdvantageScaler, Rollout, ScoredRollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.errors import RunFailed
from grpox.rollout.advantages import Advantages, BatchScaler, advantage_inputs
from grpox.rollout.dynamic_sampling import are_flat, refill, signal_of
from grpox.rollout.metrics import (
    episode_metrics,
    error_metrics,
    length_metrics,
    mean,
    reward_metrics,
    reward_signals,
)
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import (
    Logged,
    RewardInputs,
    RewardNotes,
    join_scores,
    reward_inputs,
    reward_matrix,
    score_rollouts,
    weighed_mean_logged,
    weights_of,
)
from grpox.rollout.sampler import CompletionSampler, PrefetchedBatch, SampleRequest
from grpox.rollout.streaming_scorer import StreamingScorer, need_main_thread
from grpox.runtime.foreign_code import call
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.world import run_and_gather


@dataclass(frozen=True)
class GenerationBatch:
    """N rollouts of all ranks in row order, scored."""

    indices: Sequence[int]
    """Dataset index of each group's prompt."""
    rows: Sequence[ScoredRollout]
    """Complete on the main rank, for observers; other ranks lack prompt, advantage, columns and question."""
    rewards: torch.Tensor  # f32[N, K], NaN where a function abstained
    totals: torch.Tensor  # f32[N]: weighted sums, NaN where all abstained
    scaled: Advantages
    steps: int
    """Optimizer steps that the weights had taken when the batch was collected."""
    logged: Logged
    """Metrics from `log_metric`: name -> label of the reward function -> value."""
    resampling: Mapping[str, float]
    """Metrics of dynamic sampling; empty without it."""
    dropped: Sequence[ScoredRollout] = ()
    """Completions that were sampled and then replaced."""

    @cached_property
    def rollouts(self) -> list[Rollout]:
        return [row.rollout for row in self.rows]


class Collector:
    """Makes generation batches for training."""

    def __init__(
        self,
        sampler: CompletionSampler,
        scorer: Scorer,
        prompts: PromptSet,
        scaler: AdvantageScaler,
        sampling: SamplingConfig,
        num_generations: int,
        prefetches: bool = False,
        rounds: int = 0,
    ) -> None:
        """
        Args:
            prefetches: True if batches may begin before they are collected; their age is then measured.
            rounds: rounds of dynamic sampling, after the first draw.
        """
        self.sampler = sampler
        self.scorer = scorer
        self.prompts = prompts
        self.scaler = BatchScaler(scaler)
        self.sampling = sampling
        self.num_generations = num_generations
        self.prefetches = prefetches
        self.rounds = rounds
        self.signal = signal_of(scaler)
        self.labels = [reward.label for reward in scorer.rewards]
        self.weights = weights_of(scorer.rewards)  # f32[K]
        listing = [reward.label for reward in scorer.rewards if reward.lists is not None]
        if self.scaler.takes_inputs:
            scorer.reads_lists = True
        elif listing and sampler.world.is_main:
            scorer.warn(
                "lists",
                f"advantage '{type(scaler).__name__}' gets the sums of the lists that {', '.join(listing)} "
                "returns: only a method scale(inputs) gets the lists",
            )

    def prefetch(self, generation: int, indices: Sequence[int]) -> PrefetchedBatch:
        """Begin to sample generation batch `generation` for the prompts at `indices`; a collective."""
        return self.sampler.prefetch(self._request(indices, (0, generation)))

    def _request(self, indices: Sequence[int], stream: tuple[int, ...]) -> SampleRequest:
        return SampleRequest(self.prompts, indices, self.num_generations, self.sampling, stream)

    def collect(
        self,
        generation: int,
        indices: Sequence[int],
        state: TrainerState,
        prefetched: PrefetchedBatch | None = None,
        draw: Callable[[int], Sequence[int]] | None = None,
    ) -> GenerationBatch:
        """Sample, score and scale generation batch `generation` for the prompts at `indices`; a collective.

        Args:
            prefetched: the batch, if `prefetch` began it.
            draw: returns the dataset indices of that many further prompts, which replace groups that teach
                nothing; None: such groups stay.

        Raises:
            RunFailed: sampling, scoring or scaling failed, on this rank or another.
        """
        request, indices = self._request(indices, (0, generation)), list(indices)
        rows, logged = sample_and_score(self.sampler, self.scorer, request, state, prefetched)
        dropped, resampling = list[ScoredRollout](), dict[str, float]()
        if draw is not None:
            logged, dropped, resampling = self._refill(generation, indices, rows, logged, state, draw)
        rewards, totals = reward_matrix([row.rewards.values() for row in rows]), totals_of(rows)
        scaled = self._scale(self.scaler, indices, rows, rewards, state)
        if self.sampler.world.is_main:
            rows = self._complete(indices, rows, totals, scaled)
            if bool(totals.isnan().all()):
                self.scorer.warn(
                    "nothing scored",
                    f"no completion of generation batch {generation} has a reward, because every reward "
                    f"function ({', '.join(self.labels)}) abstained for all of them: the batch teaches nothing",
                )
        steps = self.sampler.engine.steps
        return GenerationBatch(indices, rows, rewards, totals, scaled, steps, logged, resampling, dropped)

    def _refill(
        self,
        generation: int,
        indices: list[int],
        rows: list[ScoredRollout],
        logged: Logged,
        state: TrainerState,
        draw: Callable[[int], Sequence[int]],
    ) -> tuple[Logged, list[ScoredRollout], dict[str, float]]:
        """Replace groups that teach nothing in `indices` and `rows`; a collective.

        Returns:
            metrics that reward functions logged for all completions, the completions that are not in the batch,
            and the metrics of dynamic sampling.
        """
        logs, first = [(logged, len(rows))], totals_of(rows)

        def sample(number: int, count: int) -> tuple[Sequence[int], list[ScoredRollout]]:
            request = self._request(draw(count), (2, generation, number))
            new, metrics = sample_and_score(self.sampler, self.scorer, request, state)
            logs.append((metrics, len(new)))
            return request.indices, new

        dropped, metrics = refill(indices, rows, self.rounds, sample, partial(self.find_flat, state))
        # Replaced groups are too easy or too hard, so the batch's own reward says little about progress.
        if not bool(first.isnan().all()):
            metrics["dynamic_sampling/first_reward"] = float(first.nanmean())
        return weighed_mean_logged(logs), dropped, metrics

    def find_flat(
        self, state: TrainerState, indices: Sequence[int], rows: Sequence[ScoredRollout]
    ) -> list[bool]:
        """Flag the groups without advantages; a scaler whose signal is `all` is called to find out."""
        rewards, size = reward_matrix([row.rewards.values() for row in rows]), self.num_generations
        if self.signal == "functions":
            return are_flat(rewards, self.weights, size)
        if self.signal == "sum":
            return are_flat(totals_of(rows).unsqueeze(1), torch.ones(1), size)
        # A copy: a scaler may change its state, once for each generation batch.
        scaler: BatchScaler = call("advantage", copy.deepcopy, self.scaler)
        return self._scale(scaler, indices, rows, rewards, state).silent_groups(size)

    def _scale(
        self,
        scaler: BatchScaler,
        indices: Sequence[int],
        rows: Sequence[ScoredRollout],
        rewards: torch.Tensor,
        state: TrainerState,
    ) -> Advantages:
        columns = None
        if scaler.takes_inputs:
            _, columns = self.prompts.rows([indices[row.rollout.group_id] for row in rows])
        step = state.global_step + 1
        return scaler.scale(rows, advantage_inputs(rows, rewards, self.weights, indices, columns, step))

    def _complete(
        self, indices: Sequence[int], rows: Sequence[ScoredRollout], totals: torch.Tensor, scaled: Advantages
    ) -> list[ScoredRollout]:
        """Add the fields that only observers read, now: later the window of a stream may have moved on."""
        # Decode the rollouts' own prompt tokens: an environment may begin each episode differently.
        known = list(dict.fromkeys([row.rollout.prompt_ids for row in rows]))
        texts = dict(zip(known, self.prompts.prompt_texts(known), strict=True))
        columns, questions = self.prompts.columns_of(indices), self.prompts.questions(indices)
        return [
            replace(
                row,
                prompt=texts[row.rollout.prompt_ids],
                reward=total,
                advantage=advantage,
                columns=columns[row.rollout.group_id],
                question=questions[row.rollout.group_id],
            )
            for row, total, advantage in zip(rows, totals.tolist(), scaled.values.tolist(), strict=True)
        ]

    def metrics(self, batch: GenerationBatch) -> dict[str, float]:
        """Measure rewards, lengths and age of a batch."""
        metrics = {
            # First, so that names chosen by environments replace no other metric.
            **episode_metrics(batch.rollouts),
            **reward_metrics(self.labels, batch.rewards, batch.totals, self.num_generations),
            # Over all scored completions: a group for which a function always fails is replaced.
            **error_metrics(self.scorer.rewards, [*batch.rows, *batch.dropped]),
            **length_metrics(batch.rollouts),
            **batch.resampling,
        }
        if self.prefetches:
            metrics["sampling/staleness"] = mean([batch.steps - each.policy_version for each in batch.rollouts])
        return metrics

    def signals(self, batch: GenerationBatch) -> dict[str, float]:
        """Measure values that only the alarms read; see `grpox.rollout.metrics.reward_signals`."""
        # Rewards that are scaled one by one cannot drown each other.
        labels, size = [] if self.signal == "functions" else self.labels, self.num_generations
        signals = reward_signals(labels, batch.rewards, batch.totals, self.weights, size)
        for row in (*batch.rows, *batch.dropped):
            for name, value in row.extra.items():
                if value and name.endswith("/empty_tests"):
                    signals[f"{EMPTY_TESTS}{value}"] = signals.get(f"{EMPTY_TESTS}{value}", 0.0) + 1
        return signals | {"alarms/no_advantage": mean(batch.scaled.silent_groups(size))}

    def ranges(self, batches: Sequence[GenerationBatch]) -> dict[str, tuple[float, float, int]]:
        """Return lowest and highest score of each reward with a weight, and the number of its scores."""
        rows = [row for batch in batches for row in (*batch.rows, *batch.dropped)]
        ranges = {}
        for reward in self.scorer.rewards:
            scores = [score for row in rows if (score := row.rewards[reward.label]) is not None]
            if reward.weight and scores:
                ranges[reward.label] = min(scores), max(scores), len(scores)
        return ranges


def totals_of(rows: Sequence[ScoredRollout]) -> torch.Tensor:
    """f32[N]: the weighted sum of each row, NaN where all functions abstained."""
    return torch.tensor([row.reward for row in rows], dtype=torch.float64).float()


class Scorer:
    """Scores with the reward functions of training, or of the evaluation.

    Args:
        streaming: True if the generator provides `Capability.STREAMING`. Groups are then scored while others
            are generated, in calls of one or more whole groups; otherwise all groups of a rank in one call,
            when the last completion has ended.
        warn: shows the warnings of reward functions, each once.
    """

    def __init__(
        self, rewards: Sequence[NamedReward], streaming: bool = False, warn: WarnOnce | None = None
    ) -> None:
        self.rewards = rewards
        self.streaming = streaming
        self.reads_lists = False
        """True if the scaler reads the lists that functions return."""
        self.warn = warn or WarnOnce(get_logger(__name__))


def check_same_data(digests: Sequence[str]) -> None:
    """Compare the ranks' hashes of a batch's prompts; a rank that sampled none has an empty one.

    Raises:
        RunFailed: they differ.
    """
    by_digest: dict[str, list[str]] = {}
    for rank, digest in enumerate(digests):
        if digest:
            by_digest.setdefault(digest, []).append(str(rank))
    if len(by_digest) > 1:
        ranks = " and ".join(", ".join(members) for members in by_digest.values())
        raise RunFailed(
            f"the data differs by rank: ranks {ranks} read different prompts for one generation batch. Every "
            "rank must read the same rows in the same order: let a dataset depend on neither the rank, nor the "
            "time, nor random numbers of its own"
        )


def sample_and_score(
    sampler: CompletionSampler,
    scorer: Scorer,
    request: SampleRequest,
    state: TrainerState,
    prefetched: PrefetchedBatch | None = None,
) -> tuple[list[ScoredRollout], Logged]:
    """Sample what `request` asks for and score it; a collective.

    Args:
        prefetched: the batch, if `CompletionSampler.prefetch` began it.

    Returns:
        the rows of all ranks in row order, and the metrics that reward functions logged: name -> label of the
        function -> mean over completions.

    Raises:
        RunFailed: sampling or scoring failed, on this rank or another.
    """
    if prefetched is None:
        sampler.sync()

    rewards, groups = scorer.rewards, request.groups_of(sampler.world)

    def read(rollouts: Sequence[Rollout]) -> RewardInputs:
        return reward_inputs(request.prompts, request.indices, rollouts, rewards, scorer.reads_lists)

    def of_this_rank() -> tuple[list[ScoredRollout], RewardNotes, str]:
        early = None
        # Single completions are scored at the end: a call for each would cost more than it hides.
        if scorer.streaming and request.num_samples > 1 and not need_main_thread(rewards):
            early = StreamingScorer(rewards, groups, request.num_samples, read, state)
        with early or nullcontext():
            rollouts = sampler.sample(request, prefetched, None if early is None else early.arrived)
            with sampler.times.phase("reward"):
                if not rollouts:
                    return [], RewardNotes(), ""
                scored = None if early is None else early.result()
                rows, notes = scored or score_rollouts(rewards, read(rollouts), state)
                return rows, notes, "" if sampler.world.size == 1 else request.digest()

    parts = run_and_gather(sampler.world, sampler.times, of_this_rank)
    if sampler.world.size > 1:
        check_same_data([digest for _, _, digest in parts])
    rows, notes = join_scores([(rows, notes) for rows, notes, _ in parts if rows])
    if sampler.world.is_main:
        for key, what in notes.warnings.items():
            scorer.warn(key, what)
    return rows, notes.logged
