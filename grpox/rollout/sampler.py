"""Sampling: prompts -> this rank's rollouts.

Whole groups are dealt to the ranks, each of which samples its own. The weights that are sampled with come from
the engine in training, from a loaded model where nothing trains. Rollouts are checked as they come: all that
were asked for, without a contradiction.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
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
    from grpox.rollout.episodes.waves import EpisodeLoop, EpisodeRequest


OnArrival = Callable[[Rollout], None]
"""Told of each rollout as it arrives."""


@dataclass(frozen=True)
class SampleRequest:
    """Completions wanted of some prompts, on all ranks together."""

    prompts: PromptSet
    indices: Sequence[int]
    """Dataset index of each group's prompt."""
    num_samples: int
    """Completions of each prompt."""
    sampling: SamplingConfig
    stream: tuple[int, ...]
    """Tells the request's random stream from every other's, together with seed and rank."""
    seeds: Sequence[int] | None = None
    """Seed of each prompt's own draws; None: they follow from `stream` and the rank."""

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

    def digest(self) -> str:
        """Return a hash of the tokens of all prompts, those of other ranks too."""
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
        sleeps: True if the generator sleeps during updates, which then have its memory; see `release`.
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
        episodes: EpisodeLoop | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.engine = engine
        self.generator = generator
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
        """Bring the generator to the current weights, if it is not there yet; a collective."""
        if self.synced_version != self.engine.steps:
            if self.episodes is not None:
                self.episodes.wait()
            run_and_gather(self.world, self.times, self._bring_weights)
            self.synced_version = self.engine.steps

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

    def prefetch(self, request: SampleRequest) -> PrefetchedBatch:
        """Begin to sample, by a generator that samples ahead; a collective.

        The samples are of the weights of now, and are drawn as `sample` would draw them now.
        """
        self.sync()
        return on_every_rank(self.world, self.times, partial(self._begin, request))

    def _begin(self, request: SampleRequest) -> PrefetchedBatch:
        with self._asking(), self.times.phase("generate"):
            if not hasattr(self.generator, "begin"):
                raise RunFailed("the generator says that it samples ahead, and has no method 'begin'")
            self._wake()
            wanted, version = request.of_rank(self.world), self.engine.steps
            arriving: Iterable[Rollout]
            if self.episodes is None:
                arriving = self.generator.begin(wanted, request.sampling, self._seed(request))
            else:
                wave = partial(self._wave, self.generator.begin, self.versions(None))
                arriving = self.episodes.begin(self._episodes_of(request, wanted), wave)
            return PrefetchedBatch(version, arriving)

    def versions(self, prefetched: PrefetchedBatch | None) -> range:
        """Optimizer steps of the weights that may sample a batch; the last are those of now."""
        now = self.engine.steps
        return range(now if prefetched is None else prefetched.version, now + 1)

    def sample(
        self,
        request: SampleRequest,
        prefetched: PrefetchedBatch | None = None,
        arrived: OnArrival | None = None,
    ) -> list[Rollout]:
        """Sample this rank's completions, with the weights that `sync` brought.

        Args:
            prefetched: the same request's batch, if `prefetch` began it; its samples are then taken, and what
                the generator left out is drawn now.
            arrived: told of each rollout as it arrives, in any order.

        Returns:
            the rollouts in order of group and sample.

        Raises:
            RunFailed: the generator did not return what it was asked for.
        """
        wanted = request.of_rank(self.world)
        # Episodes time their own phases.
        phase = self.times.phase("generate") if self.episodes is None else nullcontext()
        with self._asking(), phase:
            rollouts = []
            if prefetched is not None:  # where reading fails on one rank, none goes on to further collectives
                rollouts = on_every_rank(self.world, self.times, lambda: self._received(prefetched, arrived))
            there = {(rollout.group_id, rollout.sample) for rollout in rollouts}
            missing = [
                prompt
                for prompt in wanted
                if any((prompt.group_id, sample) not in there for sample in range(prompt.num_samples))
            ]
            # The generators of all ranks need the weights of now where rollouts are missing on any.
            if prefetched is not None and (is_short := any(self.world.gather([bool(missing)]))):
                self.sync()
            if prefetched is None or is_short:
                rollouts += self._generate(missing, request, arrived, there)
            rollouts.sort(key=lambda rollout: (rollout.group_id, rollout.sample))
            check_rollouts(rollouts, wanted, self.versions(prefetched))
        return rollouts

    def release(self) -> None:
        """Let the generator sleep, if it is awake: call before an update, which needs its memory; a collective.

        Between batches of an evaluation or rounds of dynamic sampling the generator stays awake: vLLM forgets
        its weights when it sleeps, and would need them again for each batch.
        """
        if self.sleeps and self._is_awake:
            on_every_rank(self.world, self.times, self._sleep)

    def _sleep(self) -> None:
        self.times.memory.look()  # while the generator still has its own
        with self._asking(), self.times.phase("generate"):
            self.generator.sleep()
        self._is_awake = False

    def _wake(self) -> None:
        self.generator.wake()
        self._is_awake = True

    def _generate(
        self,
        wanted: Sequence[Prompt],
        request: SampleRequest,
        arrived: OnArrival | None,
        there: Collection[tuple[int, int]],
    ) -> list[Rollout]:
        """Draw whole groups; rollouts whose group and sample are `there` are left out when drawn again."""
        self._wake()
        if self.episodes is not None:
            rollouts: list[Rollout] = []
            wave = partial(self._wave, self.generator.generate, self.versions(None))
            self.episodes.sample(
                self._episodes_of(request, wanted),
                wave,
                lambda each: rollouts.extend(self._received([each], arrived, there)),
            )
            return rollouts
        # A list of its own: what was asked for is looked at again when all has come.
        arriving = self.generator.generate(list(wanted), request.sampling, self._seed(request))
        with ExitStack() as stack:
            if hasattr(arriving, "close"):  # a failure while it is suspended ends its requests here and now
                stack.callback(arriving.close)
            return self._received(arriving, arrived, there)

    def _wave(
        self, ask: Callable[..., Iterable[Rollout]], versions: range, prompts: Sequence[Prompt], *how: Any
    ) -> list[Rollout]:
        """Sample one turn of each episode, by the generator's `generate` or `begin`; `how`: sampling, seed."""
        rollouts = self._received(ask(list(prompts), *how), None)
        rollouts.sort(key=lambda rollout: (rollout.group_id, rollout.sample))
        check_rollouts(rollouts, prompts, versions)
        return rollouts

    def _episodes_of(self, request: SampleRequest, wanted: Sequence[Prompt]) -> EpisodeRequest:
        from grpox.rollout.episodes.waves import EpisodeRequest

        numbers = {
            prompt.group_id: (self.seed, *request.stream, prompt.group_id)
            if request.seeds is None
            else (request.seeds[prompt.group_id],)
            for prompt in wanted
        }
        return EpisodeRequest(request.prompts, wanted, request.sampling, self._seed(request), numbers)

    def _received(
        self, arriving: Iterable[Rollout], arrived: OnArrival | None, there: Collection[tuple[int, int]] = ()
    ) -> list[Rollout]:
        """List the rollouts that come, but for those whose group and sample are `there`."""
        rollouts = []
        generator = type(self.generator).__name__
        if not isinstance(arriving, Iterable):
            raise RunFailed(f"generator '{generator}' returned a {type(arriving).__name__}, {ROLLOUTS}")
        for rollout in arriving:
            if not isinstance(rollout, Rollout):
                raise RunFailed(f"generator '{generator}' yielded a {type(rollout).__name__}, {ROLLOUTS}")
            if (rollout.group_id, rollout.sample) in there:
                continue
            if problem := rollout_problem(rollout, self.vocabulary):
                where = f"group {rollout.group_id}, sample {rollout.sample}"
                raise RunFailed(f"generator '{generator}' returned a rollout ({where}) whose {problem}")
            if arrived is not None:
                arrived(rollout)
            rollouts.append(rollout)
        return rollouts

    def _seed(self, request: SampleRequest) -> int:
        entropy = [self.seed, *request.stream, self.world.rank]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    def _asking(self) -> AbstractContextManager[None]:
        return translate_exits(f"generator '{type(self.generator).__name__}'")


class WeightSource(Protocol):
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


class PrefetchedBatch:
    """This rank's part of it. It may be read more than once, though the generator's rollouts are read once."""

    def __init__(self, version: int, arriving: Iterable[Rollout]) -> None:
        """
        Args:
            version: optimizer steps of the weights that it was begun with.
            arriving: as a generator's `begin` returned it, perhaps short of samples.
        """
        self.version = version
        self._arriving = iter(arriving)
        self._came: list[Rollout] = []

    def __iter__(self) -> Iterator[Rollout]:
        """Each rollout as it comes, those first that have been read before.

        Raises:
            Exception: what went wrong with the sampling.
        """
        yield from self._came
        for rollout in self._arriving:
            self._came.append(rollout)
            yield rollout


def check_rollouts(rollouts: Sequence[Rollout], requests: Sequence[Prompt], versions: range) -> None:
    """Refuse rollouts that are not the ones asked for: nothing missing, doubled or outdated is trained on.

    Args:
        rollouts: all of them, in order of group and sample.
        requests: in order of group.
        versions: optimizer steps of the weights that may have sampled them; the last are the policy's.

    Raises:
        RunFailed: a sample is missing or doubled, or was sampled by other weights or from another prompt.
    """
    expected = [(prompt.group_id, sample) for prompt in requests for sample in range(prompt.num_samples)]
    came = [(rollout.group_id, rollout.sample) for rollout in rollouts]
    if came != expected:
        missing, more = Counter(expected) - Counter(came), Counter(came) - Counter(expected)
        differences = [
            f"{different.total()} {kind}, such as group_id {min(different)[0]} sample {min(different)[1]}"
            for kind, different in (("missing", missing), ("not asked for, or twice", more))
            if different
        ]
        raise RunFailed(
            f"the generator returned {len(rollouts)} rollouts that are not the {len(expected)} asked for: "
            + "; ".join(differences)
        )
    prompts = {prompt.group_id: prompt.token_ids for prompt in requests}
    for rollout in rollouts:
        if rollout.policy_version not in versions:
            begun = f" and sampling was begun at version {versions[0]}" if len(versions) > 1 else ""
            raise RunFailed(
                f"the generator returned a rollout of policy version {rollout.policy_version}, "
                f"the policy is at version {versions[-1]}{begun}"
            )
        # An environment may have added to the prompt of an episode.
        if rollout.episode is None and tuple(rollout.prompt_ids) != prompts[rollout.group_id]:
            raise RunFailed(
                f"the generator returned a rollout (group {rollout.group_id}, sample {rollout.sample}) "
                "whose prompt_ids are not the token_ids of its prompt"
            )


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
    if not _is_reason(rollout.finish_reason):
        return f"finish_reason is {rollout.finish_reason!r} and no text"
    known = math.inf if vocabulary is None else vocabulary
    # By type, in one pass without Python code: a batch has a million tokens.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= known:
        for token in ids:
            if not hasattr(token, "__index__") or token < 0:
                return f"completion_ids has {token!r}, which is no token id"
            if token >= known:
                return f"completion_ids has {token!r}, but the model's tokens are 0 to {known - 1}"
    for name in ("model_mask", "sampler_logprobs"):
        values = getattr(rollout, name)
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


def _is_reason(reason: Any) -> bool:
    return isinstance(reason, str) and bool(reason)


def _turns_problem(rollout: Rollout) -> str:
    count, end = len(rollout.completion_ids), 0
    written = [False] * count
    for place, turn in enumerate(rollout.turns):
        if not end <= turn.start < turn.end <= count:
            return f"turn {place} is tokens {turn.start} to {turn.end}, after token {end} and of {count}"
        if not _is_reason(turn.finish_reason):
            return f"turn {place} has the finish_reason {turn.finish_reason!r} and no text"
        if turn.reward is not None and not math.isfinite(turn.reward):
            return f"turn {place} has the reward {turn.reward}; it is finite, or None"
        end = turn.end
        written[turn.start : end] = [True] * (end - turn.start)
    mask = [True] * count if rollout.model_mask is None else [bool(each) for each in rollout.model_mask]
    for place, (is_written, is_masked) in enumerate(zip(written, mask, strict=True)):
        if is_written != is_masked:
            where = "in a turn" if is_written else "in no turn"
            return f"model_mask is {is_masked} at token {place}, which is {where}"
    return ""


def _episode_problem(episode: Episode, turns: int) -> str:
    """Find what is wrong with the conversation of a rollout."""
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
