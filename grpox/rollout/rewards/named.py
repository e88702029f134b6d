"""A reward function as a run holds it: its label and weight, and what happens when it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grpox.rollout.rewards.arguments import missing_columns, own_copies
from grpox.rollout.rewards.call import RewardCall
from grpox.rollout.rewards.process import RewardProcess
from grpox.rollout.rewards.process_call import ProcessCall


@dataclass
class NamedReward:
    """A reward function with its label in messages and metrics, and its weight in the sum."""

    label: str
    function: Callable[..., Any] | RewardProcess
    weight: float = 1.0
    on_error: Literal["fail", "abstain"] = "fail"
    """Whether a failure ends the run, or makes the function abstain for the completions it concerns."""
    timeout: float = 600.0
    """Seconds that one call may take."""
    hanging: RewardCall | ProcessCall | None = field(default=None, repr=False)
    """The call that did not end in time; while it goes on, the function is not called again."""
    needs_main_thread: bool = False
    """Whether the function was seen to set a signal handler, which Python allows in the main thread only."""

    def call(self, arguments: Mapping[str, Any], count: int) -> RewardCall | ProcessCall:
        """A call that has not started yet, in a thread or, where the function has one, in its process."""
        if isinstance(self.function, RewardProcess):
            return ProcessCall(self.function, arguments, count)
        # What one function does to its lists and rows must not reach the others, nor the record.
        return RewardCall(self.function, own_copies(self.function, arguments), count)

    def missing_columns(self, columns: Iterable[str]) -> list[str]:
        """Dataset columns that the function cannot do without and that `columns` lacks, in its own order."""
        if isinstance(self.function, RewardProcess):
            return [name for name in self.function.reads_columns if name not in {*columns}]
        return missing_columns(self.function, columns)

    @property
    def in_main_thread(self) -> bool:
        """Whether it is called in the thread that asks for scores, which is the main one and has to be."""
        return self.needs_main_thread and threading.current_thread() is threading.main_thread()
