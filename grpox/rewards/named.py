"""A reward function as a run holds it: its label and weight, and what happens when it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from grpox.rewards.call import RewardCall


@dataclass
class NamedReward:
    """A reward function with its label in messages and metrics, and its weight in the sum."""

    label: str
    function: Callable[..., Any]
    weight: float = 1.0
    on_error: Literal["fail", "abstain"] = "fail"
    """Whether a failure ends the run, or makes the function abstain for the completions it concerns."""
    timeout: float = 600.0
    """Seconds that one call may take."""
    hanging: RewardCall | None = field(default=None, repr=False)
    """The call that did not end in time; while it goes on, the function is not called again."""
    in_main_thread: bool = False
    """Whether the function is called in the thread that asks for scores: it sets a signal handler."""
