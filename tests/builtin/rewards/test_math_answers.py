r"""Answers of public data sets as the math reward reads them, thoughts, and decimal commas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from grpox_rewards.configs import CosineConfig, MathConfig
from grpox_rewards.math import Math
from grpox_rewards.text import Cosine

RAW = "She sells 9 eggs for 2 * 9 = <<2*9=18>>18 dollars.\n#### 18"
MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & %d \end{pmatrix}"
ANSWERS: list[tuple[Any, str, str]] = [
    ("18", "The answer is 18.", "The answer is 19."),  # GSM8K
    (RAW, r"So \boxed{18}", r"So \boxed{9}"),
    ("He made 70,000.\n#### 70,000", r"\boxed{70000}", r"\boxed{70}"),
    (72, "$72$", "$27$"),
    (0.5, r"\boxed{\frac{1}{2}}", r"\boxed{0.05}"),
    (1e-05, r"\boxed{0.00001}", r"\boxed{0.0001}"),
    ("70,000", r"\boxed{70000}", r"\boxed{70}"),
    ("10{,}000", r"\boxed{10000}", r"\boxed{10}"),
    (r"\frac{3}{4}", r"\boxed{0.75}", r"\boxed{\frac{4}{3}}"),  # MATH, DeepScaleR, NuminaMath
    (r"\dfrac34", r"\boxed{\frac{3}{4}}", r"\boxed{34}"),
    ("3/4", r"\boxed{\frac34}", r"\boxed{4/3}"),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", r"\boxed{3\sqrt2}"),
    (r"4\pi", r"\boxed{4\pi}", r"\boxed{4}"),
    (r"\boxed{7}", "$7$", "$8$"),
    ("$x^2+1$", r"\boxed{1+x^2}", r"\boxed{x^2-1}"),
    ("x = 5", r"\boxed{5}", r"\boxed{6}"),
    ("5", r"\boxed{x = 5}", r"\boxed{x = 6}"),
    ("(1, 2)", r"\boxed{(1,2)}", r"\boxed{(2,1)}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}", r"\boxed{\{1,3\}}"),
    ("1,2", r"\boxed{2, 1}", r"\boxed{1, 3}"),
    ("[0, 1)", r"\boxed{[0,1)}", r"\boxed{[0,2)}"),
    (r"(-\infty, 3]", r"\boxed{(-\infty,3]}", r"\boxed{(-\infty,3)}"),
    (r"(-\infty,0)\cup(1,\infty)", r"\boxed{(-\infty, 0) \cup (1, \infty)}", r"\boxed{(-\infty,0)}"),
    (r"50\%", r"\boxed{50\%}", r"\boxed{60\%}"),
    ("50%", r"\boxed{0.5}", r"\boxed{5}"),
    (r"90^\circ", r"\boxed{90^{\circ}}", r"\boxed{45^\circ}"),
    (r"5\text{ cm}", r"\boxed{5}", r"\boxed{6}"),
    (r"\$18", r"\boxed{\$18}", r"\boxed{\$19}"),
    ("-3", r"\boxed{-3}", r"\boxed{3}"),
    ("2^{10}", r"\boxed{1024}", r"\boxed{1000}"),
    (r"3.2 \times 10^5", r"\boxed{320000}", r"\boxed{32000}"),
    ("1+2i", r"\boxed{2i+1}", r"\boxed{1-2i}"),
    (MATRIX % 4, rf"\boxed{{{MATRIX % 4}}}", rf"\boxed{{{MATRIX % 5}}}"),
    ("x^2 - 1", r"\boxed{(x-1)(x+1)}", r"\boxed{x^2+1}"),
    ("x > 3", r"\boxed{x>3}", r"\boxed{x<3}"),
    (r"\log_2 8", r"\boxed{3}", r"\boxed{8}"),
    (r"1\frac{1}{2}", r"\boxed{\frac32}", r"\boxed{\frac12}"),
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
