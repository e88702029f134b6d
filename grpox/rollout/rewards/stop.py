"""Stops, from one thread, the calls of reward functions that another thread waits for."""

from __future__ import annotations

from grpox.rollout.rewards.outcome import AnyCall


class Stopped(Exception):
    """No further call is started: the stop sign was given."""


class StopSign:
    """A stop for all calls that were put under it; one thread starts the calls, another may give the sign."""

    def __init__(self) -> None:
        self.given = False
        self._calls: list[AnyCall] = []

    def cover(self, call: AnyCall) -> None:
        """Put a call that has not started under this sign; raises Stopped where the sign was given."""
        # Listed before the look at `given`, which `give` sets before it looks at the list: one of them sees.
        self._calls = [*(earlier for earlier in self._calls if earlier.running), call]
        if self.given:
            raise Stopped

    def give(self) -> None:
        """Abandon what goes on (see `RewardCall.abandon`) and let nothing more start."""
        self.given = True
        for call in self._calls:
            call.abandon()
