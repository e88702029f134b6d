"""Scores whole groups in the background while other completions are still being generated.

One thread calls the reward functions, so no function runs twice at once. Each call gets all complete groups
that wait at that moment, so after the last completion at most one call follows the running one. Timing decides
which groups a call gets; a group is never split, and the groups of a call are in order of id.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from grpox.contracts import Rollout, ScoredRollout, TrainerState
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.call import current_device, use_device
from grpox.rollout.rewards.scoring import (
    RewardInputs,
    RewardNotes,
    join_inputs,
    join_scores,
    score_rollouts,
)


class StreamingScorer:
    """Scores the groups of one rank's batch, each once its last rollout has arrived.

    Use it in a `with` block: an exception that ends the block, an interrupt above all, abandons running calls.
    The thread is a daemon, so a function that hangs does not keep the process alive.

    Args:
        groups: the groups of this rank.
        size: completions of each group.
        read: makes the inputs of reward functions from a group's rollouts; called in the thread of `arrived`,
            because neither tokenizer nor data may be used by two threads at once.
    """

    def __init__(
        self,
        rewards: Sequence[NamedReward],
        groups: range,
        size: int,
        read: Callable[[Sequence[Rollout]], RewardInputs],
        state: TrainerState,
    ) -> None:
        self._rewards = rewards
        self._arrived: dict[int, list[Rollout]] = {group: [] for group in groups}
        self._size = size
        self._read = read
        self._state = state
        self._whole: SimpleQueue[RewardInputs | None] = SimpleQueue()
        self._parts: list[tuple[list[ScoredRollout], RewardNotes]] = []  # of each call
        self._error: BaseException | None = None
        self._is_stopped = False
        self._ended = threading.Event()
        self._device = current_device()
        inside = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=inside, args=(self._run,), name="grpox-early-scoring", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole.put(None)
        if error is not None:
            self._is_stopped = True
            for reward in self._rewards:
                reward.abandon()

    def arrived(self, rollout: Rollout) -> None:
        """Take a rollout as the generator yields it; the sampler has refused unrequested ones.

        Raises:
            RunFailed: scoring an earlier group failed.
        """
        if self._error is not None:
            raise self._error
        group = self._arrived.get(rollout.group_id, [])
        group.append(rollout)
        if len(group) == self._size:
            self._whole.put(self._read(sorted(group, key=lambda each: each.sample)))

    def result(self) -> tuple[list[ScoredRollout], RewardNotes] | None:
        """Return all groups in their order, once the last is scored.

        None if a function turned out to need the main thread: the batch must then be scored there.

        Raises:
            RunFailed: as `score_rollouts`.
        """
        self._whole.put(None)
        # Not join: where an interrupt ends it, Python 3.11 holds the thread for ended.
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return None if need_main_thread(self._rewards) else join_scores(self._parts)

    def _run(self) -> None:
        try:
            use_device(self._device)
            while not self._is_stopped and (groups := self._waiting()):
                self._parts.append(score_rollouts(self._rewards, join_inputs(groups), self._state))
                if need_main_thread(self._rewards):
                    break
        except BaseException as error:  # noqa: BLE001 - raised by `arrived` or `result`
            if not need_main_thread(self._rewards):  # else the whole batch is scored again there
                self._error = error
        finally:
            self._ended.set()

    def _waiting(self) -> list[RewardInputs]:
        """Wait for a complete group and return all complete ones; none when no more will come."""
        groups: list[RewardInputs] = []
        while (group := self._whole.get()) is not None:
            groups.append(group)
            if self._whole.empty():
                return groups
        self._whole.put(None)  # the end is still there for the next look
        return groups


def need_main_thread(rewards: Sequence[NamedReward]) -> bool:
    """Return True if a function is known to set a signal handler, which no background thread may."""
    return any(reward.needs_main_thread for reward in rewards)
