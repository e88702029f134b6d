"""Environments of a rank in the trainer's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from grpox.config import EpisodesConfig
from grpox.environments.calling import Settled, drive, settle
from grpox.rollout.episodes.host import Host
from grpox.rollout.episodes.loading import load_environments
from grpox.rollout.episodes.messages import Environments, EnvironmentSpec, Lost, Stage, Start
from grpox.rollout.rewards.call import BackgroundCall


class LocalEnvironments(Environments):
    """Environments in this process; only async calls have a time limit.

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
        self, environments: Sequence[EnvironmentSpec], tools: Sequence[EnvironmentSpec], config: EpisodesConfig
    ) -> None:
        super().__init__()
        self._config = config
        self._classes = load_environments(environments, tools)

    def close(self) -> None:
        """Close all environments."""
        self.abandon(list(self._open))

    def _new(self, starts: Mapping[int, Start]) -> dict[int, Host]:
        # A sync call runs as long as it takes: Python cannot end it in a thread that is not its own.
        limits = self._config.max_calls, self._config.tool_timeout, lambda _: contextlib.nullcontext()
        return {key: Host(self._classes[start.environment], *limits) for key, start in starts.items()}

    def _ask(self, kind: Stage, messages: Mapping[int, Any]) -> dict[int, Any]:
        """Do the work of several environments: sync calls in turn, then what they await together, and so on."""
        answers: dict[int, Any] = dict.fromkeys(messages, Lost())
        hosts = {key: self._open[key] for key in messages if key in self._open}
        works = {key: host.answer(kind, messages[key]) for key, host in hosts.items()}
        ends: dict[int, list[Settled] | None] = dict.fromkeys(works)
        while works:
            awaited: dict[int, list[Awaitable[Any]]] = {}
            for key, work in list(works.items()):
                try:
                    awaited[key] = work.send(ends[key])  # the first is None
                    continue
                except StopIteration as end:
                    answers[key] = end.value
                except SystemExit as end:
                    # It counts as lost, as in a process of its own, and is closed.
                    with contextlib.suppress(SystemExit):
                        drive(hosts[key].close(), lambda each: self._await({key: each})[key])  # noqa: B023
                    answers[key] = Lost(f"called sys.exit({end.code!r})")
                del works[key]
                self._note(key, kind, answers[key])
            ends = dict(self._await(awaited))
        return answers

    def _await(self, awaited: Mapping[int, list[Awaitable[Any]]]) -> dict[int, list[Settled]]:
        """Run awaitables of several environments, at most `EpisodesConfig.concurrency` of these at a time."""
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
