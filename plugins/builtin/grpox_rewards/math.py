"""1 if the completion's final expression equals the answer column's, judged by math-verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from grpox.contracts import Text, completion_text
from grpox_rewards.configs import MathConfig
from grpox_rewards.math_process import MathProcess, Verdict

SCORES = {
    Verdict.RIGHT: 1.0,
    Verdict.WRONG: 0.0,
    Verdict.TIMEOUT: 0.0,
    Verdict.CRASH: 0.0,
    Verdict.UNREADABLE: None,
}


class Math:
    """``1[expression(text) = expression(answer)]``, source: https://github.com/huggingface/Math-Verify.

    math-verify guards itself with signal.alarm, which works in no thread but the main one; here it runs in a
    process of its own, started at the first call, which is killed when it takes too long.
    """

    def __init__(self, config: MathConfig) -> None:
        self.config = config
        self.reads_columns = (config.column,)
        self._process = MathProcess()

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
            Verdict.UNREADABLE
            if answer is None
            else self._process.judge(answer, completion_text(completion), self.config.timeout_seconds)
            for completion, answer in zip(completions, answers, strict=True)
        ]
        if log_metric is not None:
            # Shares, because the metrics of several calls are averaged.
            log_metric("math/timeouts", verdicts.count(Verdict.TIMEOUT) / len(verdicts))
            log_metric("math/crashes", verdicts.count(Verdict.CRASH) / len(verdicts))
            log_metric("math/unreadable_answers", verdicts.count(Verdict.UNREADABLE) / len(verdicts))
        return [SCORES[verdict] for verdict in verdicts]


def answer_text(answer: Any) -> str | None:
    """An answer as math-verify can read it: 1e-05, which it would take for 1*e-05, becomes 0.00001."""
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return f"{Decimal(str(answer)):f}"
    raise TypeError(f"an answer is a string or a number, not {type(answer).__name__}: {answer!r}")
