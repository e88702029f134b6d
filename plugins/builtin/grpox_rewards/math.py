"""1 if the completion's final expression equals the answer column's, judged by math-verify.

A long-lived process judges the completion, and is killed when it takes too long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from grpox.contracts import Text, completion_text
from grpox.runtime.child import Child, ChildFailed, ChildLate, Restarted
from grpox_rewards.configs import MathConfig

START_SECONDS = 120.0
"""The process answers after one to three seconds; a machine busy compiling may take much longer."""
WORKER = Path(__file__).with_name("math_worker.py")

SCORES = {"right": 1.0, "wrong": 0.0, "unreadable": None, "timeout": 0.0, "crash": 0.0}
"""By the judgement: the first three are what the process replies, unreadable where the answer holds none."""


def _start() -> Child:
    # -P: run by path, the folder of the file would come first on sys.path, and math.py shadow `math`.
    child = Child(["-P", str(WORKER)], stall=START_SECONDS)
    try:
        child.receive(time.monotonic() + START_SECONDS)
    except ChildFailed as error:
        child.end()
        child.kill()
        raise RuntimeError(f"the math-verify process did not start: {child.printed}") from error
    return child


class Math:
    """``1[expression(text) = expression(answer)]``, source: https://github.com/huggingface/Math-Verify.

    math-verify guards itself with signal.alarm, which works in no thread but the main one; here it runs in a
    process of its own, started at the first call, which is killed when it takes too long.
    """

    def __init__(self, config: MathConfig) -> None:
        self.config = config
        self.reads_columns = (config.column,)
        self._child = Restarted(_start)

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """One score per completion; None where the answer is None or holds no expression.

        Raises:
            TypeError: an answer is neither a string nor a number.
            RuntimeError: the process that judges cannot be started.
        """
        answers = [answer_text(answer) for answer in columns[self.config.column]]
        verdicts = [
            "unreadable" if answer is None else self._judge(answer, completion_text(completion))
            for completion, answer in zip(completions, answers, strict=True)
        ]
        if log_metric is not None:
            # Shares, because the metrics of several calls are averaged.
            log_metric("math/timeouts", verdicts.count("timeout") / len(verdicts))
            log_metric("math/crashes", verdicts.count("crash") / len(verdicts))
            log_metric("math/unreadable_answers", verdicts.count("unreadable") / len(verdicts))
        return [SCORES[verdict] for verdict in verdicts]

    def _judge(self, answer: str, completion: str) -> str:
        """Return whether `completion` ends in an expression equal to `answer`, as a key of `SCORES`."""
        if self._child.current is not None and self._child.current.has_ended():
            self._child.stop()
        child = self._child.get()
        # A call that took too long goes on in its thread while the next one asks: replies would be mixed up.
        with child.in_use:
            try:
                child.send(json.dumps({"answer": answer, "completion": completion}).encode())
                return child.receive(time.monotonic() + self.config.timeout_seconds).decode()
            except ChildFailed as error:
                self._child.stop()
                return "timeout" if isinstance(error, ChildLate) else "crash"


def answer_text(answer: Any) -> str | None:
    """An answer as math-verify can read it: 1e-05, which it would take for 1*e-05, becomes 0.00001."""
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return f"{Decimal(str(answer)):f}"
    raise TypeError(f"an answer must be a string or a number, not {type(answer).__name__}: {answer!r}")
