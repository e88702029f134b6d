"""One generation batch: sampled and scored groups -> rewards [N, K] -> advantages [N], over all ranks.

Each rank scores the groups that it sampled; then every rank has the rows of all. Row = group * G + sample, so
that the order of completion changes nothing.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from grpox.config import SamplingConfig
from grpox.config.alarms import EMPTY_TESTS
from grpox.contracts import AdvantageScaler, Rollout, ScoredRollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.errors import RunFailed
from grpox.rollout.advantages import Advantages, BatchScaler, ScoredBatch
from grpox.rollout.dynamic_sampling import PromptGroup, in_group, is_flat, refill, signal_of
from grpox.rollout.episode_metrics import episode_metrics, success_rate
from grpox.rollout.metrics import error_metrics, length_metrics, mean, reward_metrics, reward_signals
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import (
    Logged,
    ScoredRow,
    ScoredRows,
    Unscored,
    joined,
    score_rows,
    unscored,
    weighed_mean_logged,
    weighted_sum,
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
    rows: Sequence[ScoredRow]
    rewards: torch.Tensor  # f32[N, K], NaN where a function abstained
    totals: torch.Tensor  # f32[N]: weighted sums, NaN where all abstained
    scaled: Advantages
    steps: int
    """Optimizer steps of the weights that the batch was collected for."""
    resampling: Mapping[str, float]
    """Metrics of dynamic sampling; none without it."""
    logged: Logged
    """Metrics from `log_metric`: name -> label of the reward function -> value."""
    dropped: Sequence[ScoredRow] = ()
    """Completions that were sampled for it and replaced."""
    columns: Sequence[Mapping[str, Any]] = ()
    """The data's other columns of each group, on the main rank: the window of a stream may move on."""
    questions: Sequence[str] = ()
    """The user's last message of each group, on the main rank."""

    @cached_property
    def rollouts(self) -> list[Rollout]:
        return [row.rollout for row in self.rows]

    @property
    def advantages(self) -> torch.Tensor:
        """f32[N]; of a completion whose tokens have different ones, the mean over those of the model."""
        return self.scaled.values


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
            prefetches: batches may be begun before they are collected; how old they are is then measured.
            rounds: of dynamic sampling, after the first.
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
            draw: returns the dataset indices of so many further prompts, where groups that teach nothing are to
                be replaced.

        Raises:
            RunFailed: sampling, scoring or scaling failed, on this rank or another.
        """
        request = self._request(indices, (0, generation))
        rows, logged = sample_and_score(self.sampler, self.scorer, request, state, prefetched)
        dropped, resampling = list[ScoredRow](), dict[str, float]()
        if draw is not None:
            logs, first = [(logged, len(rows))], self._totals(rows)

            def sample(number: int, count: int) -> list[PromptGroup]:
                request = self._request(draw(count), (2, generation, number))
                new, metrics = sample_and_score(self.sampler, self.scorer, request, state)
                logs.append((metrics, len(new)))
                return self._groups(request.indices, new)

            groups = self._groups(indices, rows)
            dropped, resampling = refill(groups, self.rounds, sample, lambda each: self.find_flat(each, state))
            indices = [index for index, _ in groups]
            rows = [row for _, of_group in groups for row in of_group]
            logged = weighed_mean_logged(logs)
            # What is replaced is too easy or too hard: the batch's own reward no longer tells of progress.
            if not bool(first.isnan().all()):
                resampling["dynamic_sampling/first_reward"] = float(first.nanmean())
        scored, is_main = self._scored(rows, indices, state), self.sampler.world.is_main
        batch = GenerationBatch(
            indices,
            rows,
            scored.rewards,
            self._totals(rows),
            self.scaler.scale(scored),
            self.sampler.engine.steps,
            resampling,
            logged,
            dropped,
            self.prompts.columns_of(indices) if is_main else (),
            self.prompts.questions(indices) if is_main else (),
        )
        if is_main and bool(batch.totals.isnan().all()):
            self.scorer.warn(
                "nothing scored",
                f"no completion of generation batch {generation} has a reward, because every reward function "
                f"({', '.join(self._labels)}) abstained for all of them: the batch teaches nothing",
            )
        return batch

    def _groups(self, indices: Sequence[int], rows: Sequence[ScoredRow]) -> list[PromptGroup]:
        size = self.num_generations
        return [(index, rows[place * size : (place + 1) * size]) for place, index in enumerate(indices)]

    def _scored(self, rows: Sequence[ScoredRow], indices: Sequence[int], state: TrainerState) -> ScoredBatch:
        return ScoredBatch(
            rows,
            reward_matrix(rows),
            self._weights,
            indices,
            lambda: self.prompts.rows([indices[row.rollout.group_id] for row in rows])[1],
            state.global_step + 1,
            self._labels,
        )

    def find_flat(self, groups: Sequence[PromptGroup], state: TrainerState) -> list[bool]:
        """Tell from which groups the scaler makes no advantages; one that may look at anything is asked."""
        if self.signal != "all":
            return [is_flat(reward_matrix(rows), self._weights, self.signal) for _, rows in groups]
        rows = [row for place, (_, own) in enumerate(groups) for row in in_group(place, own)]
        # A copy: a scaler may change its state, once for each generation batch.
        scaler: BatchScaler = call("advantage", copy.deepcopy, self.scaler)
        scaled = scaler.scale(self._scored(rows, [index for index, _ in groups], state))
        return scaled.silent_groups(self.num_generations)

    @property
    def _labels(self) -> list[str]:
        return [reward.label for reward in self.scorer.rewards]

    @property
    def _weights(self) -> torch.Tensor:
        """f32[K]"""
        return torch.tensor([reward.weight for reward in self.scorer.rewards])

    def _totals(self, rows: Sequence[ScoredRow]) -> torch.Tensor:
        """f32[N]: the weighted sum of each row, NaN where all abstained."""
        return weighted_sum(reward_matrix(rows), self._weights).float()

    def metrics(self, batch: GenerationBatch) -> dict[str, float]:
        """Measure rewards, lengths and age of a batch."""
        metrics = {
            **reward_metrics(self._labels, batch.rewards, batch.totals, self.num_generations),
            # Of all that was scored: a group for which a function fails altogether is replaced.
            **error_metrics(self.scorer.rewards, [row.failed for row in (*batch.rows, *batch.dropped)]),
            **length_metrics(batch.rollouts),
            **batch.resampling,
        }
        # Names that environments choose replace no other metric.
        metrics = {**episode_metrics(batch.rollouts), **metrics}
        if (success := success_rate(batch.rollouts)) is not None:
            metrics["episodes/success"] = success
        if self.prefetches:
            metrics["sampling/staleness"] = mean([batch.steps - row.policy_version for row in batch.rollouts])
        return metrics

    def signals(self, batch: GenerationBatch) -> dict[str, float]:
        """Measure what the alarms read and no metric has; see `grpox.rollout.metrics.reward_signals`."""
        signals = {"alarms/no_advantage": mean(batch.scaled.silent_groups(self.num_generations))}
        extra = [item for row in (*batch.rows, *batch.dropped) for item in row.extra.items()]
        empty = Counter(row for name, row in extra if name.endswith("/empty_tests") and row)
        signals |= {f"{EMPTY_TESTS}{row}": float(count) for row, count in empty.items()}
        # Where each reward is scaled by itself, none drowns another.
        labels = [] if self.signal == "functions" else self._labels
        return signals | reward_signals(
            labels, batch.rewards, batch.totals, self._weights, self.num_generations
        )

    def ranges(self, batches: Sequence[GenerationBatch]) -> dict[str, tuple[float, float, int]]:
        """Lowest and highest score of each reward with a weight, and the number of its scores, over batches."""
        rows = [row for batch in batches for row in (*batch.rows, *batch.dropped)]
        ranges = {}
        for place, reward in enumerate(self.scorer.rewards):
            scores = [score for row in rows if (score := row.rewards[place]) is not None]
            if reward.weight and scores:
                ranges[reward.label] = min(scores), max(scores), len(scores)
        return ranges

    def scored(self, batch: GenerationBatch) -> list[ScoredRollout]:
        """The batch as observers see it, with texts."""
        # Of the tokens themselves, as the generator had them; an environment may begin each episode otherwise.
        known = list(dict.fromkeys(rollout.prompt_ids for rollout in batch.rollouts))
        texts = dict(zip(known, self.prompts.prompt_texts(known), strict=True))
        labels = self._labels
        numbers = zip(batch.rows, batch.totals.tolist(), batch.advantages.tolist(), strict=True)
        return [
            ScoredRollout(
                rollout=row.rollout,
                prompt=texts[row.rollout.prompt_ids],
                completion=row.completion,
                rewards=dict(zip(labels, row.rewards, strict=True)),
                reward=total,
                advantage=advantage,
                extra=row.extra,
                columns=batch.columns[row.rollout.group_id],
                question=batch.questions[row.rollout.group_id],
            )
            for row, total, advantage in numbers
        ]


def reward_matrix(rows: Sequence[ScoredRow]) -> torch.Tensor:
    """f32[N, K], NaN where a function abstained."""
    return torch.tensor([[math.nan if r is None else r for r in row.rewards] for row in rows])


class Scorer:
    """Scores with the reward functions of training, or of the evaluation.

    Args:
        streaming: whether the generator provides `Capability.STREAMING`. Groups are then scored while others
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

    def at_tokens(self, scored: ScoredRows, prompts: PromptSet) -> ScoredRows:
        """Put the numbers of lists at their tokens, for a scaler that reads them."""
        shapes = {reward.label: reward.lists for reward in self.rewards if reward.lists is not None}
        if not (self.reads_lists and shapes):
            return scored

        def decode(token_ids: Sequence[int]) -> str:
            return prompts.completion_texts([token_ids])[0]

        rows = [
            replace(
                row,
                lists={},
                token_rewards={
                    label: shape.at_tokens(
                        row.lists[label], row.rollout, row.completion, decode, prompts.conversational
                    )
                    for label, shape in shapes.items()
                },
            )
            for row in scored.rows
        ]
        return replace(scored, rows=rows)


def check_same_data(digests: Sequence[str]) -> None:
    """Compare the hashes of a batch's prompts, one a rank; empty on a rank that sampled none of them.

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
) -> tuple[list[ScoredRow], Logged]:
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

    def read(rollouts: Sequence[Rollout]) -> Unscored:
        return unscored(request.prompts, request.indices, rollouts, rewards)

    def of_this_rank() -> ScoredRows:
        early = None
        # A call for each single completion would cost more than it hides: it is scored at the end.
        if scorer.streaming and request.num_samples > 1 and not need_main_thread(rewards):
            early = StreamingScorer(rewards, groups, request.num_samples, read, state)
        with early or nullcontext():
            rollouts = sampler.sample(request, prefetched, None if early is None else early.arrived)
            with sampler.times.phase("reward"):
                scored = None if early is None else early.result()
                if scored is None:
                    scored = score_rows(rewards, read(rollouts), state) if rollouts else ScoredRows()
                scored = scorer.at_tokens(scored, request.prompts)
                if sampler.world.size == 1 or not rollouts:
                    return scored
                return replace(scored, prompts_digest=request.digest())

    parts = run_and_gather(sampler.world, sampler.times, of_this_rank)
    check_same_data([part.prompts_digest for part in parts])
    whole = joined([part for part in parts if part.rows])
    if sampler.world.is_main:
        for key, what in whole.warnings.items():
            scorer.warn(key, what)
    return whole.rows, whole.logged
