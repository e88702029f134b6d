"""Scoring: this rank's rollouts -> rows with rewards, which every rank then has in row order.

Row = group * G + sample, so that the order of completion changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from grpox.contracts import Rollout, TrainerState
from grpox.rollout.prefetch import PrefetchedBatch
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.log import Logged, weighed_mean_logged
from grpox.rollout.rewards.scoring import ScoredRow, ScoredRows, score_rows, unscored
from grpox.rollout.sampler import CompletionSampler, SampleRequest
from grpox.rollout.streaming_scorer import GroupAssembler, StreamingScorer, need_main_thread
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.world import gathered


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
        self.warn = warn or WarnOnce(get_logger(__name__))

    def stream(
        self, request: SampleRequest, sampler: CompletionSampler, versions: range, state: TrainerState
    ) -> AbstractContextManager[StreamingScorer | None]:
        """Score groups while others are sampled, within a `with` block; None where all is scored at the end."""
        # A call for each single completion would cost more than it hides: it is scored at the end.
        if not self.streaming or request.num_samples == 1 or need_main_thread(self.rewards):
            return nullcontext()
        groups = GroupAssembler(request.groups_of(sampler.world), request.num_samples, versions)
        return StreamingScorer(
            self.rewards,
            groups,
            lambda rollouts: unscored(request.prompts, request.indices, rollouts),
            state,
        )

    def score(
        self,
        request: SampleRequest,
        rollouts: Sequence[Rollout],
        state: TrainerState,
        streamed: StreamingScorer | None = None,
    ) -> ScoredRows:
        """Score this rank's rollouts of a request, but for those that were `streamed` and are scored.

        Raises:
            RunFailed: a function failed whose failure ends the run; see `grpox.rollout.rewards.score`.
        """
        scored = None if streamed is None else streamed.result()
        if scored is not None or not rollouts:
            return scored or ScoredRows()
        return score_rows(self.rewards, unscored(request.prompts, request.indices, rollouts), state)


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

    def of_this_rank() -> ScoredRows:
        with scorer.stream(request, sampler, sampler.versions(prefetched), state) as streamed:
            arrived = None if streamed is None else streamed.arrived
            rollouts = sampler.sample(request, prefetched, arrived)
            with sampler.times.phase("reward"):
                return scorer.score(request, rollouts, state, streamed)

    parts = gathered(sampler.world, sampler.times, of_this_rank)
    rows = [row for part in parts for row in part.rows]
    rows.sort(key=lambda row: (row.rollout.group_id, row.rollout.sample))
    if sampler.world.is_main:
        for part in parts:
            scorer.warn.all(part.warnings)
    return rows, weighed_mean_logged((part.logged, len(part.rows)) for part in parts)
