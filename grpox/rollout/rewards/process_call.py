"""One call of a reward function in its own process; used as `grpox.rollout.rewards.call.RewardCall` is."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from grpox.errors import text_of
from grpox.rollout.rewards.call import CallLog, CheckedScores
from grpox.rollout.rewards.messages import Reply, Request
from grpox.rollout.rewards.process import ProcessFailed, RewardProcess


class RemoteError(Exception):
    """An exception of a function in its process.

    Args:
        trace: the traceback there. As a note, line for line, it is shown whole where one long text is cut.
    """

    def __init__(self, trace: str) -> None:
        super().__init__("raised in the process of the reward")
        self.add_note(trace)


class ProcessCall:
    """A call for `count` completions, in a thread that waits for the process and enforces its limits.

    Once it has ended, either `scores` is set, or `failure` says what went wrong, and `error` tells of the
    exception where the function raised.
    """

    def __init__(self, process: RewardProcess, arguments: Mapping[str, Any], count: int) -> None:
        self.log = CallLog()
        self.scores: CheckedScores | None = None
        self.failure = ""
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._process = process
        self._request = Request(arguments, count, seed_of(arguments))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.run, name="grpox-reward-process", daemon=True)

    def start(self) -> None:
        """Start the call in its thread."""
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Whether the call has ended: it always does, since a process that takes longer is killed."""
        self._ended.wait()
        return True

    def abandon(self) -> None:
        """Kill the process, if it is at work."""
        if self.running:
            self._process.stop()

    @property
    def running(self) -> bool:
        """Whether the function may still be at work."""
        return not self._ended.is_set()

    def needs_main_thread(self) -> bool:
        """Never: the function has the main thread of its process."""
        return False

    def run(self) -> None:
        """Ask and wait for the answer."""
        begun = time.perf_counter()
        try:
            self._take(self._process.ask(self._request))
        except ProcessFailed as error:
            self.failure = str(error)
        except BaseException as error:  # noqa: BLE001 - the waiting thread tells it
            self.failure, self.error = f"could not be called: {text_of(error)}", error
        finally:
            self.seconds = time.perf_counter() - begun
            self._ended.set()

    def _take(self, reply: Reply) -> None:
        self.failure = reply.failure
        self.error = RemoteError(reply.trace) if reply.trace else None
        if reply.values is not None:
            self.scores = CheckedScores(reply.values, reply.refused)
            self.log = CallLog(reply.metrics, reply.columns)


def seed_of(arguments: Mapping[str, Any]) -> int:
    """A seed for a call: the same for the same completions at the same step, whatever was called before."""
    step = getattr(arguments.get("trainer_state"), "global_step", 0)
    # Python's hash of whole numbers is the same in every process, unlike that of text.
    return hash((step, *map(tuple, arguments.get("completion_ids", ())))) & 0xFFFFFFFF
