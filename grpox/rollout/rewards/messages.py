"""Messages between the trainer and the process of a reward function, pickled."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpox.contracts import StatisticReduction
from grpox.data.reward_signature import Signature
from grpox.errors import Problem
from grpox.rollout.rewards.lists import ListShape

ANY = Signature(None, frozenset(), ())
"""The signature of a function that takes anything."""
WHERE = signal.SIGUSR2
"""Asks the process for the stack of its main thread."""


@dataclass(frozen=True)
class RewardSpec:
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
    signature: Signature = ANY
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


ATTRIBUTES = "attribute_hashes"
"""The method of each process that hashes the function's attributes; see `grpox.plugins.component_state`."""


@dataclass(frozen=True)
class RewardRequest:
    """One call of the function, or of one of its optional methods."""

    method: str
    """Name of the method; empty: the function itself."""
    arguments: Any
    """Arguments by name; of a method a tuple of them."""
    count: int = 0
    """Completions."""
    seed: int = 0
    """Seed of the random generators of Python, numpy and torch, set before a call of the function."""
    lengths: Sequence[int] | None = None
    """Numbers in the list of each completion; None if it returns no lists."""


@dataclass(frozen=True)
class Reply:
    """The outcome of a call."""

    value: Any = None
    """Scores and log, or what the method returned; None where the call failed."""
    failure: str = ""
    """Reason why the whole call failed."""
    trace: str = ""
    """The traceback of what was raised, as text."""
