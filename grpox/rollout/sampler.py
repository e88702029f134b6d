"""Sampling: prompts -> this rank's rollouts.

Whole groups are dealt to the ranks, and each rank samples its own. The weights come from the engine in
training, or from a loaded model where nothing trains. Each rollout is checked as it arrives: it was requested,
and does not contradict itself.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np

from grpox.config import SamplingConfig
from grpox.contracts import CallFailure, Episode, Generator, Prompt, Rollout
from grpox.data.prompts import PromptSet
from grpox.errors import RunFailed, shorten
from grpox.plugins.component_state import odd_part
from grpox.policy.weight_stream import persistent_buffers
from grpox.runtime.foreign_code import translate_exits
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World, on_every_rank, run_and_gather

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpox.contracts import WeightStream


Key = tuple[int, int]
"""Group and sample of a rollout."""
OnArrival = Callable[[Rollout], None]
"""Receives each rollout as it arrives."""
Wave = Callable[[list[Prompt], SamplingConfig, int], Sequence[Rollout]]
"""Samples a turn of each prompt of this rank: prompts, sampling, seed of the call -> rollouts in order."""


@dataclass(frozen=True)
class SampleRequest:
    """Completions of some prompts, requested from all ranks together."""

    prompts: PromptSet
    indices: Sequence[int]
    """Dataset index of each group's prompt."""
    num_samples: int
    """Completions of each prompt."""
    sampling: SamplingConfig
    stream: tuple[int, ...]
    """Numbers that no other request has; all draws follow from them, the run's seed and the rank."""
    seeds: Sequence[int] | None = None
    """Seed of each prompt's own draws; None: they follow from `stream`."""

    def groups_of(self, world: World) -> range:
        """Return the groups that this rank samples."""
        return range(world.rank, len(self.indices), world.size)

    def of_rank(self, world: World) -> list[Prompt]:
        """List the prompts that this rank samples, in order of group."""
        return [
            Prompt(
                group,
                self.prompts.token_ids(self.indices[group]),
                self.num_samples,
                self.seeds[group] if self.seeds else None,
                row=self.indices[group],
            )
            for group in self.groups_of(world)
        ]

    def call_seed(self, seed: int, rank: int) -> int:
        """Return the seed of the generator's call on a rank, in a run with `seed`."""
        return int(np.random.SeedSequence([seed, *self.stream, rank]).generate_state(1)[0])

    def episode_seed(self, seed: int, group: int, *numbers: int) -> int:
        """Return a seed of a group, on whatever rank it is sampled, in a run with `seed`.

        Args:
            numbers: sample and turn of a draw; none: the seed of the group's environments.
        """
        own = (seed, *self.stream, group) if self.seeds is None else (self.seeds[group],)
        return int(np.random.SeedSequence([*own, len(numbers), *numbers]).generate_state(1)[0])

    def digest(self) -> str:
        """Return a hash of the tokens of all prompts, including those of other ranks."""
        hashed = hashlib.blake2b(digest_size=16)
        for index in self.indices:
            ids = self.prompts.token_ids(index)
            hashed.update(array("q", [index, len(ids), *ids]).tobytes())
        return hashed.hexdigest()


ROLLOUTS = "but an iterable of grpox.contracts.Rollout is needed, num_samples of them for each prompt"
"""End of the message about a generator that returns something else."""


class CompletionSampler:
    """Samples from the current policy, on all ranks: for training and for evaluation.

    Args:
        times: phase timer; a new one by default.
        sleeps: True if the generator sleeps during updates, which then use its memory; see `release`.
        episodes: gives completions several turns; None: each is one turn.
        vocabulary: number of tokens that the model knows; None: accept any token.
    """

    def __init__(
        self,
        engine: WeightSource,
        generator: Generator,
        world: World,
        seed: int,
        times: PhaseTimes | None = None,
        sleeps: bool = True,
        episodes: EpisodeSampler | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.engine = engine
        self.generator = generator
        self._name = f"generator '{type(generator).__name__}'"
        self.world = world
        self.seed = seed
        self.times = times or PhaseTimes()
        self.sleeps = sleeps
        self.episodes = episodes
        self.vocabulary = vocabulary
        self.synced_version: int | None = None
        self._is_awake = False
        """True from the first sampling after an update until `release`."""

    def sync(self) -> None:
        """Give the generator the current weights, unless it has them; a collective."""
        if self.synced_version != self.engine.steps:
            if self.episodes is not None:
                self.episodes.wait()
            run_and_gather(self.world, self.times, self._bring_weights)
            self.synced_version = self.engine.steps

    def _bring_weights(self) -> None:
        weights = self.engine.weights()
        with self.times.phase("sync"):
            try:
                with translate_exits(self._name):
                    self.generator.sync(weights, self.engine.steps)
            except Exception:
                for _ in weights:  # the other ranks are still gathering them
                    pass
                raise

    def prefetch(self, request: SampleRequest) -> PrefetchedBatch:
        """Begin to sample with a generator that samples ahead; a collective.

        The samples use the current weights and the random draws that `sample` would use now.
        """
        self.sync()
        return on_every_rank(self.world, self.times, partial(self._begin, request))

    def _begin(self, request: SampleRequest) -> PrefetchedBatch:
        with translate_exits(self._name), self.times.phase("generate"):
            if not hasattr(self.generator, "begin"):
                raise RunFailed("the generator says that it samples ahead, and has no method 'begin'")
            self.generator.wake()
            self._is_awake = True
            prompts, version = request.of_rank(self.world), self.engine.steps
            arriving: Iterable[Rollout]
            if self.episodes is None:
                seed = request.call_seed(self.seed, self.world.rank)
                arriving = self.generator.begin(prompts, request.sampling, seed)
            else:
                wave = partial(self._wave, self.generator.begin, version)
                arriving = self.episodes.begin(request, prompts, self.seed, wave)
            return PrefetchedBatch(version, iter(arriving))

    def sample(
        self,
        request: SampleRequest,
        prefetched: PrefetchedBatch | None = None,
        arrived: OnArrival | None = None,
    ) -> list[Rollout]:
        """Sample this rank's completions, with the weights that `sync` brought.

        Args:
            prefetched: the same request's batch, if `prefetch` began it; its samples are then taken, and those
                that are missing are drawn now.
            arrived: receives each rollout as it arrives, in any order.

        Returns:
            the rollouts in order of group and sample.

        Raises:
            RunFailed: the generator did not return the requested rollouts.
        """
        prompts, now = request.of_rank(self.world), self.engine.steps
        versions = range(now if prefetched is None else prefetched.version, now + 1)
        arrivals = _Arrivals(self._name, prompts, versions, self.vocabulary, arrived)
        # Episodes time their own phases.
        phase = self.times.phase("generate") if self.episodes is None else nullcontext()
        with translate_exits(self._name), phase:
            if prefetched is None:
                self._generate(request, prompts, arrivals)
            else:
                # If reading fails on one rank, no rank enters further collectives.
                on_every_rank(self.world, self.times, partial(arrivals.take, prefetched))
                prompts = arrivals.incomplete()
                # If any rank lacks rollouts, the generators of all ranks need the current weights.
                if any(self.world.gather([bool(prompts)])):
                    self.sync()
                    self._generate(request, prompts, arrivals)
            return arrivals.in_order()

    def release(self) -> None:
        """Let the generator sleep, if it is awake: call before an update, which needs its memory; a collective.

        Between batches of an evaluation or rounds of dynamic sampling the generator stays awake: vLLM forgets
        its weights when it sleeps, and would need them again for each batch.
        """
        if self.sleeps and self._is_awake:
            on_every_rank(self.world, self.times, self._sleep)

    def _sleep(self) -> None:
        self.times.memory.look()  # while the generator still has its own
        with translate_exits(self._name), self.times.phase("generate"):
            self.generator.sleep()
        self._is_awake = False

    def _generate(self, request: SampleRequest, prompts: list[Prompt], arrivals: _Arrivals) -> None:
        """Draw whole groups."""
        self.generator.wake()
        self._is_awake = True
        if self.episodes is not None:
            wave = partial(self._wave, self.generator.generate, self.engine.steps)
            self.episodes.sample(request, prompts, self.seed, wave, lambda each: arrivals.take([each]))
            return
        seed = request.call_seed(self.seed, self.world.rank)
        arriving = self.generator.generate(prompts, request.sampling, seed)
        with ExitStack() as stack:
            if hasattr(arriving, "close"):  # a failure while it is suspended ends its requests here and now
                stack.callback(arriving.close)
            arrivals.take(arriving)

    def _wave(
        self, ask: Callable[..., Iterable[Rollout]], version: int, prompts: list[Prompt], *how: Any
    ) -> list[Rollout]:
        """Sample one turn of each episode, by the generator's `generate` or `begin`; `how`: sampling, seed."""
        arrivals = _Arrivals(self._name, prompts, range(version, version + 1), self.vocabulary)
        arrivals.take(ask(prompts, *how))
        return arrivals.in_order()


class EpisodeSampler(Protocol):
    """Gives completions several turns: `grpox.rollout.episodes.waves.EpisodeLoop`."""

    def sample(
        self, request: SampleRequest, prompts: Sequence[Prompt], seed: int, wave: Wave, arrived: OnArrival
    ) -> None:
        """Sample episodes to their ends; a collective."""
        ...

    def begin(
        self, request: SampleRequest, prompts: Sequence[Prompt], seed: int, wave: Wave
    ) -> Iterator[Rollout]:
        """Sample episodes in the background."""
        ...

    def wait(self) -> None:
        """Wait until all episodes in the background have ended."""
        ...


class WeightSource(Protocol):
    """The current weights, to sample from."""

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far: the version of the weights."""
        ...

    def weights(self) -> WeightStream:
        """Yield all weights, unsharded; a collective."""
        ...


class FixedPolicy:
    """A model that is not trained, complete on every rank."""

    steps = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.module = model

    def weights(self) -> WeightStream:
        """Yield each parameter by name, tied ones once, and the persistent buffers."""
        for name, tensor in chain(self.module.named_parameters(), persistent_buffers(self.module)):
            yield name, tensor.detach()


@dataclass
class PrefetchedBatch:
    """This rank's part of a batch. It can be read repeatedly, and reads the generator's rollouts once."""

    version: int
    """Optimizer steps of the weights that sample it."""
    arriving: Iterator[Rollout]
    """Rollouts that the generator's `begin` has yet to yield; some samples may be missing."""
    came: list[Rollout] = field(default_factory=list)

    def __iter__(self) -> Iterator[Rollout]:
        """Yield the rollouts that were read before, then each new one as it arrives.

        Raises:
            Exception: the error of the generator.
        """
        yield from self.came
        for rollout in self.arriving:
            self.came.append(rollout)
            yield rollout


class _Arrivals:
    """The rollouts of some prompts. Each is checked as it arrives, before it is scored or trained on.

    Args:
        generator: its name in messages.
        prompts: in order of group.
        versions: versions of the weights that may have sampled them; the last is the current one.
        arrived: receives each rollout.
    """

    def __init__(
        self,
        generator: str,
        prompts: Sequence[Prompt],
        versions: range,
        vocabulary: int | None,
        arrived: OnArrival | None = None,
    ) -> None:
        self._generator = generator
        self._prompts = {(each.group_id, n): each for each in prompts for n in range(each.num_samples)}
        self._versions, self._vocabulary, self._arrived = versions, vocabulary, arrived
        self._rollouts: dict[Key, Rollout] = {}
        self._earlier: Set[Key] = frozenset()

    def take(self, arriving: Iterable[Rollout]) -> None:
        """Take rollouts as they arrive, in any order.

        Raises:
            RunFailed: a rollout was not requested, arrives twice, is of other weights or another prompt, or
                contradicts itself.
        """
        if not isinstance(arriving, Iterable):
            raise RunFailed(f"{self._generator} returned a {type(arriving).__name__}, {ROLLOUTS}")
        for rollout in arriving:
            if not isinstance(rollout, Rollout):
                raise RunFailed(f"{self._generator} yielded a {type(rollout).__name__}, {ROLLOUTS}")
            key, now = (rollout.group_id, rollout.sample), self._versions[-1]
            if key in self._earlier:
                continue
            prompt, problem = self._prompts.get(key), rollout_problem(rollout, self._vocabulary)
            if prompt is None or key in self._rollouts:
                problem = "that was not asked for" if prompt is None else "twice"
            elif problem:
                problem = f"whose {problem}"
            elif rollout.policy_version not in self._versions:
                begun = f" and sampling was begun at version {self._versions[0]}"
                problem = f"of policy version {rollout.policy_version}, the policy is at version {now}"
                problem += begun if len(self._versions) > 1 else ""
            # An environment may have added to the prompt of an episode.
            elif rollout.episode is None and tuple(rollout.prompt_ids) != prompt.token_ids:
                problem = "whose prompt_ids are not the token_ids of its prompt"
            if problem:
                where = f"group {rollout.group_id}, sample {rollout.sample}"
                raise RunFailed(f"{self._generator} returned a rollout ({where}) {problem}")
            if self._arrived is not None:
                self._arrived(rollout)
            self._rollouts[key] = rollout

    def incomplete(self) -> list[Prompt]:
        """List the prompts that lack a sample. Samples that arrived stay when their prompt is drawn again."""
        self._earlier = frozenset(self._rollouts)
        groups = {group for group, _ in self._prompts.keys() - self._earlier}
        return [prompt for (group, n), prompt in self._prompts.items() if n == 0 and group in groups]

    def in_order(self) -> list[Rollout]:
        """List all rollouts in order of group and sample; raises RunFailed if one is missing."""
        if missing := self._prompts.keys() - self._rollouts.keys():
            group, sample = min(missing)
            raise RunFailed(
                f"{self._generator} returned {len(self._rollouts)} of {len(self._prompts)} rollouts asked for: "
                f"{len(missing)} missing, such as group_id {group} sample {sample}"
            )
        return [self._rollouts[key] for key in self._prompts]


def rollout_problem(rollout: Rollout, vocabulary: int | None = None) -> str:
    """Describe the first field of a rollout that does not fit the others; empty if all do.

    Args:
        vocabulary: number of tokens that the model knows; None: accept any token.
    """
    ids: Any = rollout.completion_ids  # a generator may give anything
    logprobs: Any = rollout.sampler_logprobs
    if not hasattr(ids, "__len__"):
        return f"completion_ids is a {type(ids).__name__} and no tuple of token ids"
    if not len(ids):
        return "completion_ids is empty: the tokens that the model wrote are needed, an ending EOS included"
    if not (isinstance(rollout.finish_reason, str) and rollout.finish_reason):
        return f"finish_reason is {rollout.finish_reason!r} and no text"
    known = math.inf if vocabulary is None else vocabulary
    # By type, in one pass without Python code: a batch has a million tokens.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= known:
        for token in ids:
            if not hasattr(token, "__index__") or token < 0:
                return f"completion_ids has {token!r}, which is no token id"
            if token >= known:
                return f"completion_ids has {token!r}, but the model's tokens are 0 to {known - 1}"
    for name, values in (("model_mask", rollout.model_mask), ("sampler_logprobs", logprobs)):
        if values is not None and len(values) != len(ids):
            return f"{name} has {len(values)} values for {len(ids)} completion tokens"
    if logprobs is not None and set(map(type, logprobs)) != {float}:
        odd = [value for value in logprobs if not hasattr(value, "__float__")]
        if odd:
            return f"sampler_logprobs has {odd[0]!r}, which is no number"
    if rollout.model_mask is not None and not any(rollout.model_mask):
        return "model_mask is False for every token: the model wrote none"
    return (
        (_turns_problem(rollout) if rollout.turns else "")
        or (_plain_problem(rollout.extra, "extra") if rollout.extra else "")
        or (_episode_problem(rollout.episode, len(rollout.turns) or 1) if rollout.episode is not None else "")
    )


def _turns_problem(rollout: Rollout) -> str:
    count, end = len(rollout.completion_ids), 0
    written = [False] * count
    for place, turn in enumerate(rollout.turns):
        if not end <= turn.start < turn.end <= count:
            return f"turn {place} is tokens {turn.start} to {turn.end}, after token {end} and of {count}"
        if not (isinstance(turn.finish_reason, str) and turn.finish_reason):
            return f"turn {place} has the finish_reason {turn.finish_reason!r} and no text"
        if turn.reward is not None and not math.isfinite(turn.reward):
            return f"turn {place} has the reward {turn.reward}; it is finite, or None"
        end = turn.end
        written[turn.start : end] = [True] * (end - turn.start)
    mask = [True] * count if rollout.model_mask is None else list(map(bool, rollout.model_mask))
    if mask == written:
        return ""
    token = [one == other for one, other in zip(mask, written, strict=True)].index(False)
    return f"model_mask is {mask[token]} at token {token}, which is in {'a' if written[token] else 'no'} turn"


def _episode_problem(episode: Episode, turns: int) -> str:
    """Describe the first problem of a conversation; empty if there is none."""
    for message in episode.messages:
        if not (type(message) is dict and isinstance(message.get("role"), str)):
            return f"episode has the message {shorten(repr(message), 60)}, which is no dict with a role"
    for result in episode.results:
        if not 0 <= result.turn < turns:
            return f"episode has a call of tool {result.call.name!r} in turn {result.turn} of {turns}"
        if result.failure not in get_args(CallFailure):
            allowed = ", ".join(filter(None, get_args(CallFailure)))
            return f"episode has a call of tool with failure {result.failure!r}; it is {allowed} or empty"
    if episode.times and len(episode.times) != turns:
        return f"episode has times of {len(episode.times)} turns, and there are {turns}"
    if not math.isfinite(episode.weight):
        return f"episode has the weight {episode.weight}"
    parts = episode.rewards or {}
    if any(type(value) not in (int, float) for value in parts.values()):
        return f"episode.rewards is {shorten(repr(parts), 60)}, not numbers by name"
    plain = {"messages": list(episode.messages), "rewards": parts, "info": episode.info}
    return next(filter(None, (_plain_problem(value, f"episode.{name}") for name, value in plain.items())), "")


def _plain_problem(value: Any, name: str) -> str:
    """Find the first value that is not plain: checkpoints and the record hold plain values alone."""
    if (odd := odd_part(value, name)) is None:
        return ""
    given = f"{shorten(repr(odd[1]), 60)} ({type(odd[1]).__name__})"
    return f"{odd[0]} is {given}: it holds texts, numbers, None, and lists and dicts by text of these"
