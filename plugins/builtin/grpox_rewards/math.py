"""Reward 1 if the completion's final expression equals the answer column's, judged by math-verify.

A long-lived process judges the completions; it is killed when one takes too long.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from grpox.contracts import Text, completion_text
from grpox.runtime.child import Child, ChildFailed, ChildLate, Restarted
from grpox_rewards.configs import MathConfig

START_SECONDS = 120.0
"""Time limit for the start. The process answers after one to three seconds; a busy machine may take much
longer."""
WORKER = Path(__file__).with_name("math_worker.py")

DECIMAL = re.compile(r"(?<![\d.,])(\d+(?:\.\d{3})*)(?:,|\{,\})(\d+)(?![.,]?\d)")
"""Number with a decimal comma; LaTeX writes 3{,}14."""
SCORES = {"right": 1.0, "wrong": 0.0, "unreadable": None, "timeout": 0.0, "crash": 0.0}
"""Verdict -> score. The process replies with one of the first three; unreadable: the answer has no
expression."""


def _start() -> Child:
    # -P keeps this folder off sys.path, where math.py would shadow `math`.
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

    math-verify limits its time with signal.alarm, which works only in the main thread. Here it therefore runs
    in
    a separate process, which starts at the first call and is killed when a judgement takes too long.
    """

    def __init__(self, config: MathConfig) -> None:
        self.config = config
        self.reads_columns = config.reads_columns
        self._child = Restarted(_start)

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        prompts: Sequence[Text] = (),
        prompt_ends: Sequence[str] = (),
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; None if the answer is None or contains no expression.

        Raises:
            TypeError: an answer is neither a string nor a number.
            RuntimeError: the judging process cannot be started.
        """
        answers = [answer_text(answer) for answer in columns[self.config.column]]
        nothing = [""] * len(answers)
        texts = map(outcome, map(completion_text, completions), prompts or nothing, prompt_ends or nothing)
        verdicts = [
            "unreadable" if answer is None else self._judge(answer, text)
            for text, answer in zip(texts, answers, strict=True)
        ]
        if log_metric is not None:
            # Shares, because the metrics of several calls are averaged.
            log_metric("math/timeouts", verdicts.count("timeout") / len(verdicts))
            log_metric("math/crashes", verdicts.count("crash") / len(verdicts))
            log_metric("math/unreadable_answers", verdicts.count("unreadable") / len(verdicts))
        return [SCORES[verdict] for verdict in verdicts]

    def _judge(self, answer: str, completion: str) -> str:
        """Judge whether `completion` ends in an expression equal to `answer`; return a key of `SCORES`."""
        if self._child.current is not None and self._child.current.has_ended():
            self._child.stop()
        child = self._child.get()
        # A call that took too long continues in its thread during the next one: without the lock, replies would
        # mix.
        with child.in_use:
            try:
                texts = {"answer": answer, "completion": completion}
                if self.config.decimal_comma:
                    texts = {
                        name: DECIMAL.sub(lambda number: f"{number[1].replace('.', '')}.{number[2]}", text)
                        for name, text in texts.items()
                    }
                child.send(json.dumps(texts).encode())
                return child.receive(time.monotonic() + self.config.timeout_seconds).decode()
            except ChildFailed as error:
                self._child.stop()
                return "timeout" if isinstance(error, ChildLate) else "crash"


def outcome(completion: str, prompt: Text, end: str) -> str:
    """Return what follows the last thought; nothing if a thought is not closed.

    Args:
        prompt: may end with a message that the model continues.
        end: of the prompt as the model reads it, after the chat template.
    """
    _, closed, rest = completion.rpartition("</think>")
    begun = completion_text(prompt[-1:]).rpartition("</think>")[2]  # empty where the last message is a user's
    is_open = "<think>" in begun or end.rstrip().endswith("<think>")
    return "" if "<think>" in rest or (is_open and not closed) else rest


def answer_text(answer: Any) -> str | None:
    """Return an answer that math-verify reads correctly: 1e-05, which it would read as 1*e-05, becomes
    0.00001."""
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return f"{Decimal(str(answer)):f}"
    raise TypeError(f"an answer must be a string or a number, not {type(answer).__name__}: {answer!r}")
