"""Messages between the loop of episodes and the environments, which are pickled where these have processes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from grpox.contracts import Message, ToolCall, ToolResult


@dataclass(frozen=True)
class EnvironmentSpec:
    """Instructions to build environments of one class, or to find a tool."""

    label: str
    """Name in messages and metrics; of a tool its name for the model."""
    key: str
    """Key in the run file, for example ``environment`` or ``tools[0]``."""
    target: Any
    """``package.module:name``, ``/path/to/file.py:name``, or the class or function itself."""
    config: bytes = pickle.dumps(None)
    """The checked parameters, pickled by themselves: their class is known once `target` has been loaded."""


@dataclass(frozen=True)
class Start:
    """Builds an environment and resets it."""

    environment: int
    """Place of the environment in the run's list."""
    row: Mapping[str, Any]
    """The prompt's row of the dataset, the prompt included."""
    seed: int


@dataclass(frozen=True)
class Action:
    """A complete turn of the model."""

    text: str
    """Its text, without special tokens."""
    calls: Sequence[ToolCall] | None = None
    """Calls in the turn, unless the environment's own `parse` reads others; None: not known."""


@dataclass(frozen=True)
class Observation:
    """The environment's answer to `Start` or `Action`."""

    content: str | Sequence[Message] | None = None
    """Text or messages; None: nothing, and after an action without calls the episode is over."""
    results: Sequence[ToolResult] = ()
    """Answers to all calls of the turn, in the order of the calls."""
    done: bool = False
    """True if the environment ended the episode."""
    state_key: str | None = None
    """Key of the state in which the model's next turn begins."""
    failure: str = ""
    """Exception of the environment in `reset` or `reply`, with its file and line; the episode then ends."""


@dataclass(frozen=True)
class EpisodeOutcome:
    """The end of an episode, as its environment reports it; the environment is closed."""

    rewards: Mapping[str, float] | None = None
    """Parts of the reward by name, a single number under ``""``; None: it abstains."""
    turn_rewards: Sequence[float | None] = ()
    """One for each action, or none."""
    info: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    """Exceptions of `reward`, `turn_rewards`, `info` and `close`."""


@dataclass(frozen=True)
class Lost:
    """The environment's process has ended, or was ended because it hung; nothing else is known of it."""

    reason: str = "is not open"


@dataclass
class Counters:
    """Numbers of environments since the beginning; the open ones are the difference."""

    opened: int = 0
    closed: int = 0
    lost: int = 0
    """Environments whose processes ended before they were closed."""


class Stage(IntEnum):
    """Requests to an environment, in the order of an episode."""

    START = 1
    STEP = 2
    FINISH = 3
    CLOSE = 4
    """Close without an outcome."""


LAST = (Stage.FINISH, Stage.CLOSE)
"""Requests after which an environment is closed."""


class Environments:
    """The environments of a rank: each episode has one under its key, from `start` to `finish`.

    Methods may be called by several threads at once, for different keys. Each waits for all answers, which come
    under the same keys; an episode whose environment is `Lost` needs no `finish`.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self._counting = threading.Lock()
        self._open: dict[int, Any] = {}
        """Key -> object that stands for the environment, from its building to its end."""

    def start(self, starts: Mapping[int, Start]) -> dict[int, Observation | Lost]:
        """Build and reset environments.

        Raises:
            RunFailed: a row of the data cannot be sent to another process.
            ConfigError: the process of the environments had to be started again, and could not load them.
        """
        with self._counting:
            if twice := starts.keys() & self._open.keys():
                raise ValueError(f"the environment {min(twice)} is open")
            self._open |= self._new(starts)
            self.counters.opened += len(starts)
        return self._ask(Stage.START, starts)

    def step(self, actions: Mapping[int, Action]) -> dict[int, Observation | Lost]:
        """Give each environment a turn of its model."""
        return self._ask(Stage.STEP, actions)

    def finish(self, keys: Sequence[int]) -> dict[int, EpisodeOutcome | Lost]:
        """Ask for the outcomes of ended episodes, and close their environments."""
        return self._ask(Stage.FINISH, dict.fromkeys(keys))

    def abandon(self, keys: Sequence[int]) -> None:
        """Close environments whose episodes are no longer needed; lost ones are left out."""
        self._ask(Stage.CLOSE, dict.fromkeys(keys))

    def close(self) -> None:
        """Close all environments, and end their processes."""
        raise NotImplementedError

    def _new(self, starts: Mapping[int, Start]) -> dict[int, Any]:
        """Return the object that stands for each environment."""
        raise NotImplementedError

    def _ask(self, kind: Stage, messages: Mapping[int, Any]) -> dict[int, Any]:
        """Send requests, and return the answers to all; to an environment that is not open, `Lost`."""
        raise NotImplementedError

    def _note(self, key: int, kind: Stage, answer: object) -> None:
        """Count an environment that an answer ends."""
        if isinstance(answer, Lost) or kind in LAST:
            with self._counting:
                if self._open.pop(key, None) is not None:
                    self.counters.lost += isinstance(answer, Lost)
                    self.counters.closed += not isinstance(answer, Lost)
