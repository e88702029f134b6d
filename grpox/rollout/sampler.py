"""Sampling: prompts -> scored rollouts, over all ranks.

Whole groups are dealt to the ranks, each of which samples and scores its own; then every rank holds all
rollouts in row order (row = group * G + sample), so that the order of completion changes nothing. The weights
that are sampled with come from the engine in training, from a loaded model where nothing trains.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np

from grpox.config import SamplingConfig
from grpox.contracts import Generator, Prompt, Rollout, TrainerState
from grpox.data.prompts import PromptSet
from grpox.errors import RunFailed
from grpox.errors.warn_once import TellOnce
from grpox.plugins.component import exits_told
from grpox.policy.buffers import persistent_buffers
from grpox.rollout.prefetch import Begun
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.log import weighed_mean_logged
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


def _read(begun: Begun, early: EarlyScoring | None) -> list[Rollout]:
    """What was begun, once it is in; `early` is told of each as it arrives."""
    rollouts = []
    for rollout in begun:
        if early is not None:
            early.arrived(rollout)
        rollouts.append(rollout)
    return rollouts


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
