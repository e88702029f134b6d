"""Requests of observers to change or end the run; the trainer applies them between two steps, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from grpox.errors import nearest

PREFIX = "hyperparameters/"
"""Metrics with the values of settings that observers have changed."""


@dataclass
class ControlState:
    """Effects of observers on the run, as checkpoints hold them."""

    changed: dict[str, float] = field(default_factory=dict)
    """Hyperparameter -> its value, where an observer has set it."""
    stop_reason: str = ""
    """The reason why an observer ended the run; empty while none has."""

    def metrics(self) -> dict[str, float]:
        """Return the changed values as metrics."""
        return {f"{PREFIX}{name}": value for name, value in self.changed.items()}


class RunControl:
    """Collects the requests of the observers of rank 0; `grpox.contracts.Control` describes its use.

    Args:
        hyperparameters: settings that may change -> their values.
        checks: the same settings -> functions that raise ValueError for a value that is not possible.
        fixed: settings that this run does not let observers change -> the reason and the cure.
    """

    def __init__(
        self,
        hyperparameters: Mapping[str, float],
        checks: Mapping[str, Callable[[float], object]],
        fixed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._values = dict(hyperparameters)
        self._checks, self._fixed = checks, fixed
        self._state = ControlState()

    @property
    def hyperparameters(self) -> Mapping[str, float]:
        """The settings that may change -> their values; those that were set in this step included."""
        return MappingProxyType(self._values)

    def set(self, name: str, value: float) -> None:
        """Change a hyperparameter from the next step on.

        Raises:
            ValueError: no such hyperparameter, or a value that is not a finite number.
        """
        if name in self._fixed:
            raise ValueError(f"hyperparameter {name}: {self._fixed[name]}")
        if name not in self._values:
            near = nearest(name, self._values)
            guess = f", did you mean {near}" if near else ""
            known = ", ".join(sorted(self._values))
            raise ValueError(f"this run has no hyperparameter '{name}' that can change{guess}; it has {known}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"hyperparameter {name}: {value!r} is not a finite number")
        try:
            self._checks[name](float(value))
        except ValueError as error:
            raise ValueError(f"hyperparameter {name} = {value:g}: {error}") from error
        self._values[name] = self._state.changed[name] = float(value)

    def stop(self, reason: str) -> None:
        """End the run after this step; the first reason counts."""
        self._state.stop_reason = self._state.stop_reason or str(reason) or "an observer ended it"

    def take(self) -> ControlState:
        """Return the requests since the last call."""
        requests, self._state = self._state, ControlState()
        return requests
