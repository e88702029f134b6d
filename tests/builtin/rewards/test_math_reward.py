r"""The reward math: answers of public data sets, thoughts, decimal commas, and the process that judges."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.patience import patient
from support.services import is_running, wait_until

from grpox_rewards import math as math_reward
from grpox_rewards.configs import CosineConfig, MathConfig
from grpox_rewards.math import Math
from grpox_rewards.text import Cosine

RAW = "She sells 9 eggs for 2 * 9 = <<2*9=18>>18 dollars.\n#### 18"
MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & %d \end{pmatrix}"
ANSWERS: list[tuple[Any, str, str]] = [
    (r"The sum is \boxed{3}", r"\boxed{3}", r"\boxed{2}"),
    (np.float64(0.5), "0.5", "5"),
    ("18", "The answer is 18.", "The answer is 19."),  # GSM8K
    (RAW, r"So \boxed{18}", r"So \boxed{9}"),
    ("He made 70,000.\n#### 70,000", r"\boxed{70000}", r"\boxed{70}"),
    (72, "$72$", "$27$"),
    (0.5, r"\boxed{\frac{1}{2}}", r"\boxed{0.05}"),
    (1e-05, r"\boxed{0.00001}", r"\boxed{0.0001}"),
    ("70,000", r"\boxed{70000}", r"\boxed{70}"),
    ("10{,}000", r"\boxed{10000}", r"\boxed{10}"),
    (r"\frac{3}{4}", r"\boxed{0.75}", r"\boxed{\frac{4}{3}}"),  # MATH, DeepScaleR, NuminaMath
    (r"\boxed{7}", "$7$", "$8$"),
    ("$x^2+1$", r"\boxed{1+x^2}", r"\boxed{x^2-1}"),
    ("5", r"\boxed{x = 5}", r"\boxed{x = 6}"),
    ("(1, 2)", r"\boxed{(1,2)}", r"\boxed{(2,1)}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}", r"\boxed{\{1,3\}}"),
    ("(1, 2)", r"\boxed{(1, 2)}", r"\boxed{2}"),
    (r"(-\infty,0)\cup(1,\infty)", r"\boxed{(-\infty, 0) \cup (1, \infty)}", r"\boxed{(-\infty,0)}"),
    (r"50\%", r"\boxed{50\%}", r"\boxed{60\%}"),
    (r"5\text{ cm}", r"\boxed{5}", r"\boxed{6}"),
    (r"3.2 \times 10^5", r"\boxed{320000}", r"\boxed{32000}"),
    (MATRIX % 4, rf"\boxed{{{MATRIX % 4}}}", rf"\boxed{{{MATRIX % 5}}}"),
    ("x > 3", r"\boxed{x>3}", r"\boxed{x<3}"),
    ("B", r"\boxed{B}", r"\boxed{C}"),
    (r"\text{even}", r"\boxed{\text{even}}", r"\boxed{\text{odd}}"),
    ("12", "<think>1</think><answer>12</answer>", "<think>12</think><answer>13</answer>"),
    ("073", r"\boxed{73}", r"\boxed{37}"),  # AIME
    ("5", r"Therefore, the final answer is: $\boxed{5}$. I hope it is correct.", r"It is $\boxed{4}$."),
]
"""Answer, right completion, wrong completion."""


@pytest.fixture(scope="module")
def reward() -> Iterator[Math]:
    made = Math(MathConfig())
    yield made
    made._child.stop()


@pytest.mark.parametrize(("answer", "right", "wrong"), ANSWERS)
def test_an_answer_of_a_public_form_is_read(answer: Any, right: str, wrong: str, reward: Math) -> None:
    assert reward(completions=[right, wrong, ""], answer=[answer] * 3) == [1.0, 0.0, 0.0]


MESSAGES = [{"role": "user", "content": "Write <think> first."}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "<think>\nIt is"}]
THOUGHTS: list[tuple[str, Any, str, float]] = [
    (r"<think>\boxed{5}</think> \boxed{7}", "q", "?", 1.0),
    (r"<think>\boxed{7}</think> \boxed{5}", "q", "?", 0.0),
    (r"<think>\boxed{7}", "q", "?", 0.0),
    (r"<think>\boxed{7}</think>", "q", "?", 0.0),
    (r"<think>a</think> no, <think>\boxed{7}", "q", "?", 0.0),
    (r"<think>a</think> \boxed{5} <think>b</think> \boxed{7}", "q", "?", 1.0),
    (r"\boxed{7}", MESSAGES, "<|im_start|>assistant\n<think>\n", 0.0),
    (r"\boxed{5}</think> \boxed{7}", MESSAGES, "<|im_start|>assistant\n<think>\n", 1.0),
    (r"\boxed{7}", MESSAGES, "<|im_start|>assistant\n<think>\n\n</think>\n\n", 1.0),
    (r"\boxed{7}", "A: <think>\n", "A: <think>\n", 0.0),
    (r"\boxed{7}", "Put thoughts in <think>. 3 + 4?", "3 + 4?", 1.0),
    (r"\boxed{7}", BEGUN, "assistant\n<think>\nIt is", 0.0),
    (r"\boxed{7}", [*BEGUN[:1], {"role": "assistant", "content": "<think>a</think> So"}], "So", 1.0),
]
"""Completion, prompt, its end as the model reads it, score for the answer 7."""


@pytest.mark.parametrize("kind", ["math", "cosine"])
def test_the_answer_follows_the_last_thought_that_is_closed(kind: str, reward: Math) -> None:
    completions, prompts, ends, expected = (list(each) for each in zip(*THOUGHTS, strict=True))
    columns = {"prompts": prompts, "prompt_ends": ends, "answer": ["7"] * len(ends)}
    if kind == "math":
        assert reward(completions=completions, **columns) == expected
        return
    config = CosineConfig(
        max_length=9, correct_by="math", min_value_wrong=0, max_value_wrong=0, min_value_correct=1
    )
    by_length = Cosine(config)
    assert by_length(completions=completions, completion_ids=[[1]] * len(ends), **columns) == expected
    by_length._judge._child.stop()  # type: ignore[attr-defined]


def test_a_comma_may_be_decimal() -> None:
    commas = Math(MathConfig(decimal_comma=True))
    cases: list[tuple[Any, str, str]] = [
        ("3,14", r"\boxed{3.14}", r"\boxed{314}"),
        ("3.14", "Es sind $3{,}14$.", "Es sind 3,15."),
        (3.14, "Das Ergebnis ist 3,14.", "Das Ergebnis ist 3,41."),
        ("1.234,5", r"\boxed{1234,5}", r"\boxed{1,2345}"),
        ("0,5", r"\boxed{\frac12}", r"\boxed{5}"),
        ("1,234,567", r"\boxed{1234567}", r"\boxed{1.234567}"),
    ]
    for answer, right, wrong in cases:
        assert commas(completions=[right, wrong], answer=[answer] * 2) == [1.0, 0.0], answer
    commas._child.stop()


def test_what_takes_too_long_is_killed_and_the_next_is_judged() -> None:
    """A tower of powers that no computer can work out; then an ordinary answer."""
    logged: dict[str, float] = {}
    limited = Math(MathConfig(timeout_seconds=patient(0.375)))
    limited(completions=["1"], answer=["1"])  # the process is up: what follows takes the time limit alone
    hostile = r"\boxed{9^{9^{9^{9^{9}}}} + 1}"
    scores = limited(completions=[hostile, "5"], answer=["4", "5"], log_metric=logged.__setitem__)
    assert scores == [0, 1]
    assert logged == {"math/timeouts": 0.5, "math/crashes": 0, "math/unreadable_answers": 0}


def test_hostile_completions_threads_and_answers_that_are_none(reward: Math) -> None:
    logged: dict[str, float] = {}
    completions = ["9" * 1_000_000, "6", "7", "7", "7"]
    answers = ["4", "6", None, "apples", float("nan")]
    scores = reward(completions=completions, answer=answers, log_metric=logged.__setitem__)
    assert scores == [0, 1, None, None, None]
    assert logged["math/unreadable_answers"] == pytest.approx(0.6)
    with pytest.raises(TypeError, match="not bool: True"):
        reward(completions=["1"], answer=[True])
    # In a thread no alarm can be set.
    scores: list[float | None] = []
    thread = threading.Thread(target=lambda: scores.extend(reward(completions=["5"], answer=["5"])))
    thread.start()
    thread.join()
    assert scores == [1]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a process that replaces the judging one."""
    monkeypatch.setattr(math_reward, "WORKER", tmp_path / "worker.py")
    return tmp_path / "worker.py"


def test_a_process_that_dies_scores_nothing_right_and_the_next_completion_has_another(worker: Path) -> None:
    worker.write_text(
        "import json, os\nfrom grpox.runtime.child import connect_to_parent\n"
        "parent = connect_to_parent()\nparent.send_bytes(b'ready')\n"
        "while True:\n"
        "    if json.loads(parent.recv_bytes())['completion'] == 'crash': os._exit(1)\n"
        "    parent.send_bytes(b'right')\n"
    )
    logged: dict[str, float] = {}
    replaced = Math(MathConfig())
    scores = replaced(completions=["a", "crash", "b"], answer=["1"] * 3, log_metric=logged.__setitem__)
    assert scores == [1, 0, 1]
    assert logged["math/crashes"] == pytest.approx(1 / 3)
    # One that does not start tells why.
    worker.write_text("raise ImportError('no math-verify here')\n")
    with pytest.raises(RuntimeError, match="no math-verify here"):
        Math(MathConfig())(completions=["1"], answer=["1"])


def test_a_process_at_work_does_not_outlive_a_parent_that_is_killed() -> None:
    script = (
        "from grpox_rewards.configs import MathConfig\n"
        "from grpox_rewards.math import Math\n"
        f"reward = Math(MathConfig(timeout_seconds={patient(0.5)}))\n"
        "reward._child.get()\n"
        "print(reward._child.current.pid, flush=True)\n"
        r"reward(completions=['\\boxed{9^{9^{9^{9^{9}}}} + 1}'], answer=['4'])"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    try:
        begun = worker.cpu_times().user
        is_at_work = "the second judgement is under way"
        wait_until(lambda: worker.cpu_times().user > begun + 0.1, is_at_work, 60, parent)
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate()
        wait_until(lambda: not is_running(worker.pid), "the process has ended", 20)
    finally:
        parent.kill()
        parent.wait()
        with suppress(psutil.NoSuchProcess):
            worker.kill()
