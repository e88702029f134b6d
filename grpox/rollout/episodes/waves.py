"""The loop of episodes, above any generator: in each wave every open episode gets one turn of the model.

A wave is one ordinary call of the generator with the tokens of each open episode, after which all environments
answer at the same time. The first turns are sampled as a group where all completions of a prompt have the same
beginning. Ranks go from wave to wave together, because a generator's call may be a collective; a rank whose
episodes have all ended asks for nothing.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from grpox.config import EpisodesConfig
from grpox.contracts import Prompt, Rollout
from grpox.data.prompts import PromptSet
from grpox.errors import RunFailed
from grpox.rollout.episodes.calls import with_calls
from grpox.rollout.episodes.episode import OpenEpisode
from grpox.rollout.episodes.messages import Action, Environments, EpisodeOutcome, Lost, Observation, Start
from grpox.rollout.episodes.turn_tokens import TurnTokens
from grpox.rollout.sampler import OnArrival, SampleRequest, Wave
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World, on_every_rank

RESETS = 3
"""Number of times that an environment is built and reset before its failure ends the run."""


class EpisodeLoop:
    """Samples episodes with the environments of this rank.

    Args:
        labels, weights: of the run's environments; the weights are factors of their own rewards.
        place_of: dataset, row -> place of the row's environment.
        tokens_of: dataset -> tokens of its prompts and turns.
    """

    def __init__(
        self,
        config: EpisodesConfig,
        environments: Environments,
        labels: Sequence[str],
        weights: Sequence[float],
        place_of: Callable[[PromptSet, int], int],
        tokens_of: Callable[[PromptSet], TurnTokens],
        world: World,
        times: PhaseTimes,
    ) -> None:
        self.config, self.environments, self.labels, self.weights = config, environments, labels, weights
        self.place_of, self.tokens_of = place_of, tokens_of
        self.world = world
        self._times = times
        self.keys = itertools.count()
        self.warn = WarnOnce(get_logger(__name__))
        self._background: list[threading.Thread] = []

    def sample(
        self, request: SampleRequest, prompts: Sequence[Prompt], seed: int, wave: Wave, arrived: OnArrival
    ) -> None:
        """Sample episodes to their ends; a collective.

        Args:
            prompts: the prompts of `request` that this rank samples.
            seed: of the run.
            arrived: receives each episode as it ends.

        Raises:
            RunFailed: sampling failed, or an environment cannot be reset, on this rank or another.
        """
        together = partial(on_every_rank, self.world, self._times)
        waves = _Waves(self, request, prompts, seed, wave, arrived, self._times)
        try:
            together(waves.start)
            while any(self.world.gather([waves.is_open])):
                together(waves.take_turn)
        finally:
            waves.abandon()

    def begin(
        self, request: SampleRequest, prompts: Sequence[Prompt], seed: int, wave: Wave
    ) -> Iterator[Rollout]:
        """Sample episodes in the background, without a collective; the arguments are those of `sample`.

        Returns:
            the episodes as they end; an error is raised there.
        """
        ended: queue.SimpleQueue[Rollout | BaseException | None] = queue.SimpleQueue()
        waves = _Waves(self, request, prompts, seed, wave, ended.put, PhaseTimes())

        def run() -> None:
            try:
                waves.start()
                while waves.is_open:
                    waves.take_turn()
                ended.put(None)
            except BaseException as error:  # noqa: BLE001 - raised where the episodes are read
                ended.put(error)
            finally:
                waves.abandon()

        thread = threading.Thread(target=run, name="grpox-episodes", daemon=True)
        self._background.append(thread)
        thread.start()
        return _read(ended)

    def wait(self) -> None:
        """Wait until all episodes in the background have ended: before the generator gets other weights."""
        for thread in self._background:
            thread.join()
        self._background.clear()


def _read(ended: queue.SimpleQueue[Rollout | BaseException | None]) -> Iterator[Rollout]:
    while (each := ended.get()) is not None:
        if isinstance(each, BaseException):
            raise each
        yield each


class _Waves:
    """The open episodes of one request on this rank."""

    def __init__(
        self,
        loop: EpisodeLoop,
        request: SampleRequest,
        prompts: Sequence[Prompt],
        seed: int,
        wave: Wave,
        arrived: OnArrival,
        times: PhaseTimes,
    ) -> None:
        self.loop, self.request, self.prompts = loop, request, prompts
        self.tokens = loop.tokens_of(request.prompts)
        self._call_seed = request.call_seed(seed, loop.world.rank)
        self._seed = partial(request.episode_seed, seed)
        self._wave, self._arrived, self._times = wave, arrived, times
        self._open: dict[int, OpenEpisode] = {}
        self._has_environment: set[int] = set()
        """Keys of environments that were started and not finished."""
        self._turn = 0
        self._longest = request.sampling.max_completion_length
        self._limit = min(self._longest, loop.config.max_turn_tokens or self._longest)  # of a turn

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def start(self) -> None:
        """Reset an environment for each episode, again where it fails, and write the episodes' prompts.

        Raises:
            RunFailed: an environment failed `RESETS` times.
        """
        starts = {}
        for prompt in self.prompts:
            row = self.request.indices[prompt.group_id]
            place = self.loop.place_of(self.request.prompts, row)
            seed = self._seed(prompt.group_id)
            start = Start(place, self.request.prompts.row(row), seed)
            for sample in range(prompt.num_samples):
                key = next(self.loop.keys)
                self._open[key] = OpenEpisode(key, prompt.group_id, sample, row, place)
                starts[key] = start
        for attempt in range(RESETS):
            with self._times.phase("environment"):
                self._has_environment |= set(starts)
                answers = self.loop.environments.start(starts)
            for key, answer in answers.items():
                episode = self._open[key]
                failure = answer.reason if isinstance(answer, Lost) else answer.failure
                if isinstance(answer, Lost):
                    self._has_environment.discard(key)
                elif not failure:
                    del starts[key]
                    episode.state_key = answer.state_key
                    episode.messages = self.tokens.messages(answer.content)
                    episode.prompt_ids = self.tokens.prompt(episode.row, answer.content)
                if failure and attempt == RESETS - 1:
                    label = self.loop.labels[episode.environment]
                    where = f"row {episode.row} of {self.request.prompts.data}"
                    raise RunFailed(f"environment '{label}' cannot be reset for {where}: {failure}")
            self._finish([key for key in starts if key in self._has_environment])
            if not starts:
                break

    def take_turn(self) -> None:
        """Sample one turn of each open episode, and let the environments answer."""
        episodes = dict(self._open)
        begin = time.perf_counter()
        for episode, rollout in self._sampled(list(episodes.values())):
            episode.add_turn(rollout, begin, time.perf_counter())
        self._turn += 1
        self._deliver(episodes)
        self._close([episode for episode in episodes.values() if episode.reason])

    def _sampled(self, episodes: Sequence[OpenEpisode]) -> list[tuple[OpenEpisode, Rollout]]:
        """Sample a turn of each episode, those of a prompt together where they begin alike."""
        whole = [] if self._turn else self._whole_groups(episodes)
        together = {prompt.group_id for prompt in whole}
        above = max(together, default=-1) + 1
        alone = [each for each in episodes if each.group_id not in together]
        prompts = whole + [
            episode.prompt(
                above + episode.key,
                self._seed(episode.group_id, episode.sample, self._turn),
                min(self._limit, self._longest - len(episode.ids)),
            )
            for episode in alone
        ]
        episode_of = {(each.group_id, each.sample): each for each in episodes if each.group_id in together}
        episode_of |= {(above + each.key, 0): each for each in alone}
        seed = int(np.random.SeedSequence([self._call_seed, self._turn]).generate_state(1)[0])
        with self._times.phase("generate"):
            rollouts = self._wave(prompts, self.request.sampling, seed)
        return [(episode_of[rollout.group_id, rollout.sample], rollout) for rollout in rollouts]

    def _whole_groups(self, episodes: Sequence[OpenEpisode]) -> list[Prompt]:
        """Return one prompt for each group whose members begin alike."""
        of_group: dict[int, set[tuple[int, ...]]] = {}
        for episode in episodes:
            of_group.setdefault(episode.group_id, set()).add(episode.prompt_ids)
        for episode in episodes:
            if len(of_group[episode.group_id]) > 1:
                label = self.loop.labels[episode.environment]
                self.loop.warn(
                    label,
                    f"environment '{label}' began differently for completions of one prompt, though their seed "
                    "is equal: their rewards are compared all the same. Let reset depend on row and seed alone",
                )
        return [
            replace(
                prompt,
                token_ids=next(iter(of_group[prompt.group_id])),
                seed=self._seed(prompt.group_id, 0),
                max_tokens=self._limit,
            )
            for prompt in self.prompts
            if len(of_group[prompt.group_id]) == 1
        ]

    def _deliver(self, episodes: Mapping[int, OpenEpisode]) -> None:
        """Give each complete turn to its environment, and append its answer to the turn."""
        actions = {}
        for key, episode in episodes.items():
            turn = episode.turns[-1]
            is_whole = turn.finish_reason not in ("length", "repetition")
            message, action = self.tokens.read(episode.ids[turn.start : turn.end], episode.row, is_whole)
            episode.messages.append(message)
            if is_whole:
                actions[key] = action
            else:
                episode.reason = turn.finish_reason
        with self._times.phase("environment"):
            answers = self.loop.environments.step(actions)
        for key, answer in answers.items():
            if isinstance(answer, Lost):
                self._has_environment.discard(key)
                episodes[key].reason, episodes[key].lost = "error", answer.reason
            else:
                self._observe(episodes[key], actions[key], answer)

    def _observe(self, episode: OpenEpisode, action: Action, answer: Observation) -> None:
        """Write the environment's answer behind the turn, or end the episode."""
        turn = len(episode.turns) - 1
        calls = [result.call for result in answer.results]
        if not answer.failure and calls != list(action.calls or ()):
            own = {"role": "assistant", "content": action.text}  # the environment read other calls in it
            episode.messages[-1] = with_calls(own, calls)
        episode.results += [replace(result, turn=turn) for result in answer.results]
        episode.state_key = answer.state_key
        messages, cut = self.tokens.shortened(self.tokens.messages(answer.content, answer.results))
        episode.messages += messages
        episode.cut += cut
        if answer.failure:
            episode.reason, episode.failure = "error", answer.failure
        elif answer.done:
            episode.reason = "done"
        elif answer.content is None and not answer.results:
            episode.reason = "stop"
        elif len(episode.turns) == self.loop.config.max_turns:
            episode.reason = "turns"
        else:
            last = episode.turns[-1]
            bridge = self.tokens.bridge(episode.ids[last.start : last.end], messages)
            if len(episode.ids) + len(bridge) >= self._longest:
                episode.reason = "budget"
            else:
                episode.add_bridge(bridge)

    def _close(self, ended: Sequence[OpenEpisode]) -> None:
        outcomes = self._finish([each.key for each in ended if each.key in self._has_environment])
        for episode in ended:
            del self._open[episode.key]
            outcome = outcomes.get(episode.key, Lost(episode.lost))
            label, weight = self.loop.labels[episode.environment], self.loop.weights[episode.environment]
            self._arrived(episode.closed(label, outcome, weight))

    def _finish(self, keys: Sequence[int]) -> dict[int, EpisodeOutcome | Lost]:
        if not keys:
            return {}
        self._has_environment -= set(keys)
        with self._times.phase("environment"):
            return self.loop.environments.finish(keys)

    def abandon(self) -> None:
        """Close the environments that are left, after a failure."""
        if self._has_environment:
            self.loop.environments.abandon(sorted(self._has_environment))
            self._has_environment.clear()
