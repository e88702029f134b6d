"""Messages between the trainer and the process of a reward function, pickled."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpox.contracts import StatisticReduction
from grpox.errors import Problem
from grpox.rollout.rewards.call import CallLog, CheckedScores
from grpox.rollout.rewards.lists import ListShape

WHERE = signal.SIGUSR2
"""Asks the process for the stack of its main thread."""


@dataclass(frozen=True)
class Blueprint:
    """Instructions to build the function as the run would: the first message to the process."""

    label: str
    key: str
    """Key of the function in the run file, for example ``rewards[0]``."""
    target: str
    """``package.module:name``, or ``/path/to/file.py:name``."""
    from_file: bool
    config: bytes
    """The checked parameters, pickled by themselves: their class is known once `target` has been loaded."""
    import_path: tuple[str, ...]
    """The trainer's `sys.path`."""
    device: int | None
    """The trainer's CUDA device, where it has one."""


@dataclass(frozen=True)
class Ready:
    """The answer to a blueprint."""

    problems: tuple[Problem, ...] = ()
    """Reasons why the function could not be built; empty if it was."""
    needs: tuple[str, ...] = ()
    """Arguments that it cannot do without."""
    takes: frozenset[str] | None = None
    """Arguments that it takes; None if it takes any."""
    begins: str = ""
    """Line at which it is defined: ``rewards.py:12``."""
    methods: frozenset[str] = frozenset()
    """Optional methods that it has: those of state and steps."""
    statistics: Mapping[str, StatisticReduction] = field(default_factory=dict)
    """Statistics that its `end_step` asks for."""
    stateless: bool = False
    """True if it declares that it has no state."""
    lists: ListShape | None = None
    """The lists that it returns; None if it returns numbers."""
    asks: frozenset[str] = frozenset()
    """Facts about episodes that it names."""


@dataclass(frozen=True)
class Request:
    """One call."""

    arguments: Mapping[str, Any]
    count: int
    """Completions."""
    seed: int
    """Seed of the random generators of Python, numpy and torch, set before the call."""
    lengths: Sequence[int] | None = None
    """Numbers in the list of each completion; None if it returns no lists."""


ATTRIBUTES = "attribute_hashes"
"""The method of each process that hashes the function's attributes; see `grpox.plugins.component_state`."""


@dataclass(frozen=True)
class MethodRequest:
    """One call of an optional method of the function."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class MethodReply:
    """The outcome of a call of an optional method."""

    value: Any = None
    failure: str = ""
    trace: str = ""
    """The traceback, as text."""


@dataclass(frozen=True)
class Reply:
    """The outcome of a call."""

    scores: CheckedScores | None = None
    """None where the whole call failed."""
    log: CallLog = field(default_factory=CallLog)
    failure: str = ""
    """Reason why the whole call failed."""
    trace: str = ""
    """The traceback of what the function raised, as text."""
