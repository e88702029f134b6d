"""The rewards exact, regex, length, soft_overlong, format, cosine and repetition, on cases worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from grpox_rewards.configs import (
    CosineConfig,
    ExactConfig,
    FormatConfig,
    LengthConfig,
    RegexConfig,
    RepetitionConfig,
    SoftOverlongConfig,
)
from grpox_rewards.text import Cosine, Exact, Format, Length, Regex, Repetition, SoftOverlong


def said(text: str) -> list[dict[str, str]]:
    """Return a completion as a conversation has it."""
    return [{"role": "assistant", "content": text}]


def test_exact_ignores_outer_space_only_and_abstains_without_an_answer() -> None:
    answers = ["85", "85", "85", None, 85, "85"]
    completions = [" 85\n", "8 5", "085", "85", "85", said("85")]
    assert Exact(ExactConfig())(completions=completions, answer=answers) == [1, 0, 0, None, 1, 1]
    assert Exact(ExactConfig(strip=False))(completions=[" 85"], answer=["85"]) == [0]
    assert Exact(ExactConfig(column="gold", ignore_case=True))(completions=["Yes"], gold=["yES"]) == [1]


def test_regex_matches_a_part_or_the_whole_or_compares_a_group_with_a_column() -> None:
    completions = ["<a>4</a>", "say <a>4</a>", "4"]
    assert Regex(RegexConfig(pattern="<a>.*</a>"))(completions=completions) == [1, 1, 0]
    whole = Regex(RegexConfig(pattern="<a>.*</a>", full=True, match=0.5, no_match=-1))
    assert whole(completions=completions) == [0.5, -1, -1]
    reward = Regex(RegexConfig(pattern=r"answer is (\d+)", column="answer"))
    completions = ["the answer is 12", "the answer is 13", "12", "the answer is 12"]
    assert reward(completions=completions, answer=["12", "12", "12", None]) == [1, 0, 0, None]
    with pytest.raises(ValidationError, match=r"not a regular expression: .* at position 1"):
        RegexConfig(pattern="a(b")


@pytest.mark.parametrize(
    ("config", "lengths", "expected"),
    [
        ({"target": 10}, (10, 5, 15, 20, 99), [0, -0.5, -0.5, -1, -1]),
        ({"target": 20, "unit": "characters", "scale": "absolute"}, (0, 20, 23, 100), [-20, 0, -3, -80]),
        ({"target": 20, "scale": "absolute"}, (0, 20, 23, 100), [-20, 0, -3, -80]),
    ],
)
def test_length_falls_on_both_sides_of_the_target(
    config: dict[str, Any], lengths: tuple[int, ...], expected: list[float]
) -> None:
    of_tokens = config.get("unit") != "characters"
    completions = ["x" if of_tokens else said("x" * length) for length in lengths]
    ids = [[1] * (length if of_tokens else 1) for length in lengths]
    assert Length(LengthConfig(**config))(completions=completions, completion_ids=ids) == expected


def test_soft_overlong_at_the_papers_lengths_and_without_a_buffer() -> None:
    reward = SoftOverlong(SoftOverlongConfig(max_length=20480, buffer=4096))
    lengths = (0, 16384, 17408, 18432, 20480, 20481, 40000)
    scores = [0, 0, -0.25, -0.5, -1, -1, -1]
    assert reward(completion_ids=[[0] * length for length in lengths]) == scores
    step = SoftOverlong(SoftOverlongConfig(max_length=3, buffer=0))
    assert step(completion_ids=[[0] * 3, [0] * 4]) == [0, -1]
    with pytest.raises(ValidationError, match="'buffer' 4 is longer than 'max_length' 3"):
        SoftOverlongConfig(max_length=3, buffer=4)


RIGHT = "<think>two and\ntwo</think>\n<answer>4</answer>"
REST = "two</think><answer>4</answer>"


@pytest.mark.parametrize(
    ("config", "scores"),
    [
        (
            {},
            {
                RIGHT: 1,
                f"\n{RIGHT}\n": 1,
                "<think></think><answer></answer>": 1,
                f"so: {RIGHT}": 0,
                f"{RIGHT} done": 0,
                "<think>a</think> so <answer>b</answer>": 0,
                "<answer>b</answer><think>a</think>": 0,
                "<think>a<answer>b</answer></think>": 0,
                "<think>a</think><answer>b</answer><answer>c</answer>": 0,
                "<think>a<think>b</think><answer>c</answer>": 0,
                "<think>a</think><answer>b": 0,
                "": 0,
                # Read quickly, though hostile.
                "<think>" + " </think" * 100_000 + "<answer>" * 100_000: 0,
                "<think></think>" + " " * 100_000: 0,
            },
        ),
        ({"opened": True}, {REST: 1, f"<think>{REST}": 0, RIGHT: 0}),
        # As TRL's.
        (
            {"tags": ["think"], "text_after": True},
            {
                "<think>\na.\n</think>\nb.": 1,
                "<think>\na.\nb.": 0,
                "b <think>a</think>": 0,
                "<think>a</think>": 1,
            },
        ),
        ({"tags": ["a.b"]}, {"<a.b>x</a.b>": 1, "<axb>x</axb>": 0}),
    ],
)
def test_format_wants_each_block_once_in_order_and_nothing_else(
    config: dict[str, Any], scores: dict[str, float]
) -> None:
    reward = Format(FormatConfig(**config))
    assert reward(completions=[*scores]) == [*scores.values()]
    assert reward(completions=[said(text) for text in scores]) == [*scores.values()]


@pytest.mark.parametrize("tags", [[], ["a", "a"], [""]])
def test_format_wants_tags_of_different_names(tags: list[str]) -> None:
    with pytest.raises(ValidationError):
        FormatConfig(tags=tags)


@pytest.mark.parametrize(
    ("begun", "completion", "opened", "expected"),
    [
        ("Let me think.\n<think>", "two</think><answer>4</answer>", False, 1),
        ("Let me think.\n<think>", RIGHT, False, 0),
        ("<think>two", "</think><answer>4</answer>", False, 1),
        ("<think>two</think> <answer>", "4</answer>", False, 1),
        ("<think>two</think> <answer>", "4", False, 0),
        ("two</think>", "<answer>4</answer>", True, 1),
        ("Well.", RIGHT, False, 1),
    ],
)
def test_format_goes_on_where_the_beginning_of_the_turn_ends(
    begun: str, completion: str, opened: bool, expected: float
) -> None:
    reward = Format(FormatConfig(opened=opened))
    question = {"role": "user", "content": "<think>?"}
    prompts = [[question, *said(begun)], [question]]
    assert reward(prompts=prompts, completions=[said(completion), said(RIGHT)]) == [expected, float(not opened)]


def cosine(lengths: list[int], completions: list[str], answers: list[Any], **parameters: Any) -> Any:
    reward = Cosine(CosineConfig(max_length=12, **parameters))
    ids = [[1] * length for length in lengths]
    return reward(completions=completions, completion_ids=ids, answer=answers)


@pytest.mark.parametrize(
    ("length", "right"),
    [
        (0, 1.0),  # cos 0 = 1
        (4, 0.875),  # cos 60 degrees = 1/2: three quarters of the way from the end
        (6, 0.75),  # cos 90 degrees = 0: half-way
        (8, 0.625),  # cos 120 degrees = -1/2
        (12, 0.5),
        (99, 0.5),
    ],
)
def test_cosine_at_angles_worked_by_hand(length: int, right: float) -> None:
    assert cosine([length] * 2, ["7", "8"], [7, 7]) == pytest.approx([right, -right])


def test_cosine_with_the_papers_values_another_judge_and_another_column() -> None:
    values = {"min_value_correct": 1, "max_value_correct": 2, "min_value_wrong": -10, "max_value_wrong": 0}
    scores = cosine([3, 3, 13, 13], ["7", "8", "7", "8"], [7] * 4, exceeded=-10, **values)
    share = (1 + math.sqrt(0.5)) / 2
    assert scores == pytest.approx([1 + share, -10 * share, -10, -10])
    # By math, or by the column that it names; None where the judge abstains.
    answers = ["\\frac{1}{2}", "\\frac{1}{2}", None]
    scores = cosine([0, 0, 0], ["so it is $0.5$", "$0.4$", "7"], answers, correct_by="math")
    assert scores == [1.0, -1.0, None]
    assert cosine([0], ["7"], [None]) == [None]
    reward = Cosine(CosineConfig(max_length=4, column="gold"))
    assert reward.reads_columns == ("gold",)
    assert reward(completions=["7"], completion_ids=[[1] * 4], gold=["7"], answer=["8"]) == [0.5]


@pytest.mark.parametrize("wrong", [{"min_value_correct": 2}, {"max_value_wrong": -2}, {"max_length": 0}])
def test_cosine_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CosineConfig(**{"max_length": 4, **wrong})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("one two", 0),  # no 3-gram
        ("one two three", 0),
        ("a b a b a b", -0.5),  # aba bab aba bab: 2 of 4
        ("Go on and go ON and", -1 / 4),  # go-on-and twice: 3 of 4
        ("x x x x x x x x x x x x", -9 / 10),
        (said("a a a a"), -0.5),
    ],
)
def test_repetition_of_words_by_hand(text: Any, expected: float) -> None:
    assert Repetition(RepetitionConfig())(completions=[text], completion_ids=[[]]) == [pytest.approx(expected)]


def test_repetition_of_tokens() -> None:
    # Pairs 12 23 31 12 23: 3 of 5.
    reward = Repetition(RepetitionConfig(unit="tokens", size=2))
    assert reward(completions=["a"], completion_ids=[[1, 2, 3, 1, 2, 3]]) == [pytest.approx(-2 / 5)]
