"""The rewards cosine and repetition, on numbers worked by hand."""

import math

import pytest
from pydantic import ValidationError

from grpox_rewards.configs import CosineConfig, RepetitionConfig
from grpox_rewards.text import Cosine, Repetition


def cosine(lengths, completions, answers, **parameters):
    reward = Cosine(CosineConfig(max_length=12, **parameters))
    return reward(completions=completions, completion_ids=[[1] * n for n in lengths], answer=answers)


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [
        (0, 1.0, -1.0),  # cos 0 = 1
        (4, 0.875, -0.875),  # cos 60 degrees = 1/2: three quarters of the way from the end
        (6, 0.75, -0.75),  # cos 90 degrees = 0: half-way
        (8, 0.625, -0.625),  # cos 120 degrees = -1/2
        (12, 0.5, -0.5),
        (99, 0.5, -0.5),
    ],
)
def test_cosine_at_angles_worked_by_hand(length, right, wrong):
    assert cosine([length] * 2, ["7", "8"], [7, 7]) == pytest.approx([right, wrong])


def test_cosine_with_the_papers_values():
    # Right from 2 to 1, wrong from -10 to 0, and -10 beyond: cos 45 degrees = 0.70711 at a quarter.
    values = {"min_value_correct": 1, "max_value_correct": 2, "min_value_wrong": -10, "max_value_wrong": 0}
    scores = cosine([3, 3, 13, 13], ["7", "8", "7", "8"], [7] * 4, exceeded=-10, **values)

    share = (1 + math.sqrt(0.5)) / 2
    assert scores == pytest.approx([1 + share, -10 * share, -10, -10])


def test_cosine_judges_by_math_and_abstains_with_it():
    scores = cosine(
        [0, 0, 0], ["so it is $0.5$", "$0.4$", "7"], ["\\frac{1}{2}", "\\frac{1}{2}", None], correct_by="math"
    )
    assert scores == [1.0, -1.0, None]
    assert cosine([0], ["7"], [None]) == [None]


def test_cosine_reads_the_column_that_it_names():
    reward = Cosine(CosineConfig(max_length=4, column="gold"))
    assert reward.reads_columns == ("gold",)
    assert reward(completions=["7"], completion_ids=[[1] * 4], gold=["7"], answer=["8"]) == [0.5]


@pytest.mark.parametrize("wrong", [{"min_value_correct": 2}, {"max_value_wrong": -2}, {"max_length": 0}])
def test_cosine_refuses(wrong):
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
    ],
)
def test_repetition_of_words_by_hand(text, expected):
    assert Repetition(RepetitionConfig())(completions=[text], completion_ids=[[]]) == [pytest.approx(expected)]


def test_repetition_of_tokens():
    # Pairs 12 23 31 12 23: 3 of 5.
    reward = Repetition(RepetitionConfig(unit="tokens", size=2))
    assert reward(completions=["a"], completion_ids=[[1, 2, 3, 1, 2, 3]]) == [pytest.approx(-2 / 5)]


def test_repetition_of_a_conversation_reads_its_last_message():
    message = [{"role": "assistant", "content": "a a a a"}]
    assert Repetition(RepetitionConfig())(completions=[message], completion_ids=[[1]]) == [-0.5]
