"""Environments of a rank in the trainer's own process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from grpox.config import EpisodesConfig
from grpox.environments.calling import Settled, Work, settle
from grpox.rollout.episodes.host import Host
from grpox.rollout.episodes.loading import load_environments
from grpox.rollout.episodes.messages import Action, Blueprint, Counters, Lost, Observation, Outcome, Start
from grpox.rollout.rewards.background_loop import BackgroundCall


class LocalEnvironments:
    """`grpox.rollout.episodes.messages.Environments` in this process; only async calls have a time limit.

    The trainer's random generators are not seeded for them. Sync methods run one after the other in the calling
    thread; async ones of all environments run together, at most `EpisodesConfig.concurrency` at the same time.

    Args:
        environments: classes, also those that no other process can import.
        tools: functions, also those that no other process can import.
        config: limits.

    Raises:
        ConfigError: they cannot be loaded, or are no environments and tools.
    """

    def __init__(
        self, environments: Sequence[Blueprint], tools: Sequence[Blueprint], config: EpisodesConfig
    ) -> None:
        self.counters = Counters()
        self._counting = threading.Lock()
        self._config = config
        self._classes = load_environments(environments, tools)
        self._hosts: dict[int, Host] = {}

    def start(self, starts: Mapping[int, Start]) -> dict[int, Observation | Lost]:
        """Build and reset environments."""
        if twice := starts.keys() & self._hosts.keys():
            raise ValueError(f"the environment {min(twice)} is open")
        for key, start in starts.items():
            config = self._config
            self._hosts[key] = Host(
                self._classes[start.environment], config.max_calls, config.tool_timeout, _no_limit
            )
        with self._counting:
            self.counters.opened += len(starts)
        return self._do(starts, lambda host, key: host.start(starts[key]))

    def step(self, actions: Mapping[int, Action]) -> dict[int, Observation | Lost]:
        """Give each environment a turn of its model."""
        return self._do(actions, lambda host, key: host.step(actions[key]))

    def finish(self, keys: Sequence[int]) -> dict[int, Outcome | Lost]:
        """Ask for the outcomes of ended episodes, and close their environments."""
        return self._forgotten(self._do(dict.fromkeys(keys), lambda host, _: host.finish()))

    def abandon(self, keys: Sequence[int]) -> None:
        """Close environments whose episodes nobody wants any more; those that are lost are left out."""
        wanted = dict.fromkeys(key for key in keys if key in self._hosts)
        self._forgotten(self._do(wanted, lambda host, _: host.abandon()))

    def close(self) -> None:
        """Close all environments."""
        self.abandon(list(self._hosts))

    def _forgotten(self, answers: dict[int, Any]) -> dict[int, Any]:
        for key, answer in answers.items():
            if not isinstance(answer, Lost) and self._hosts.pop(key, None) is not None:
                with self._counting:
                    self.counters.closed += 1
        return answers

    def _do(self, keys: Mapping[int, object], work_of: Callable[[Host, int], Work[Any]]) -> dict[int, Any]:
        """Do the work of several environments: sync calls in turn, then what they await together, and so on."""
        answers: dict[int, Any] = {key: Lost("is not open") for key in keys}
        works = {key: work_of(self._hosts[key], key) for key in keys if key in self._hosts}
        ends: dict[int, list[Settled] | None] = dict.fromkeys(works)
        while works:
            awaited: dict[int, list[Awaitable[Any]]] = {}
            for key, work in list(works.items()):
                try:
                    awaited[key] = work.send(ends[key])  # type: ignore[arg-type]  # the first is None
                except StopIteration as end:
                    answers[key] = end.value
                    del works[key]
                except SystemExit as end:
                    answers[key] = self._lost(key, end)
                    del works[key]
            ends = dict(self._await(awaited))
        return answers

    def _await(self, awaited: Mapping[int, list[Awaitable[Any]]]) -> dict[int, list[Settled]]:
        """Run awaitables of several environments, so many at a time that their number is within the limit."""
        results: dict[int, list[Settled]] = {}
        keys = list(awaited)
        while keys:
            now, keys = keys[: self._config.concurrency], keys[self._config.concurrency :]
            together = [awaitable for key in now for awaitable in awaited[key]]
            ends: list[Settled] = []
            BackgroundCall(settle(together, self._config.tool_timeout, ends)).result()
            for key in now:
                results[key], ends = ends[: len(awaited[key])], ends[len(awaited[key]) :]
        return results

    def _lost(self, key: int, end: SystemExit) -> Lost:
        """Count an environment that called sys.exit as lost, as in a process of its own, and close it."""
        work = self._hosts.pop(key).close()
        with contextlib.suppress(StopIteration, SystemExit):
            awaited = next(work)
            work.send(self._await({key: awaited})[key])
        with self._counting:
            self.counters.lost += 1
        return Lost(f"called sys.exit({end.code!r})")


@contextlib.contextmanager
def _no_limit(_what: str) -> Any:
    """Let a call run as long as it takes: Python cannot end it in a thread that is not its own."""
    yield
