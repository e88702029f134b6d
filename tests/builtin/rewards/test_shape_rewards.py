"""The rewards of form: length, soft_overlong and format, on numbers and texts worked by hand."""

import pytest
from pydantic import ValidationError

from grpox_rewards.configs import FormatConfig, LengthConfig, SoftOverlongConfig
from grpox_rewards.text import Format, Length, SoftOverlong


def test_absolute_length_is_the_reward_of_the_tutorials():
    reward = Length(LengthConfig(target=20, unit="characters", scale="absolute"))
    completions = ["", "x" * 20, "x" * 23, "x" * 100]
    scores = reward(completions=completions, completion_ids=[[1]] * 4)
    assert scores == [-abs(20 - len(completion)) for completion in completions] == [-20, 0, -3, -80]


def test_tokens_and_characters_are_counted_apart():
    tokens = Length(LengthConfig(target=4, scale="absolute"))
    characters = Length(LengthConfig(target=4, scale="absolute", unit="characters"))
    message = [{"role": "assistant", "content": "abcdef"}]
    arguments = {"completions": [message], "completion_ids": [[1, 2, 3]]}
    assert (tokens(**arguments), characters(**arguments)) == ([-1], [-2])


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (16384, 0), (17408, -0.25), (18432, -0.5), (20480, -1), (20481, -1), (40000, -1)],
)
def test_soft_overlong_at_the_papers_lengths(length, expected):
    reward = SoftOverlong(SoftOverlongConfig(max_length=20480, buffer=4096))
    assert reward(completion_ids=[[0] * length]) == [expected]


def test_soft_overlong_without_a_buffer_is_a_step_and_one_that_is_too_long_is_refused():
    reward = SoftOverlong(SoftOverlongConfig(max_length=3, buffer=0))
    assert reward(completion_ids=[[0] * 3, [0] * 4]) == [0, -1]
    with pytest.raises(ValidationError, match="'buffer' 4 is longer than 'max_length' 3"):
        SoftOverlongConfig(max_length=3, buffer=4)


RIGHT = "<think>two and\ntwo</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, 1),
        (f"\n{RIGHT}\n", 1),
        ("<think></think><answer></answer>", 1),
        (f"so: {RIGHT}", 0),
        (f"{RIGHT} done", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a<think>b</think><answer>c</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("", 0),
    ],
)
def test_format_wants_each_block_once_in_order_and_nothing_else(text, expected):
    assert (
        Format(FormatConfig())(completions=[text, [{"role": "assistant", "content": text}]]) == [expected] * 2
    )


def test_format_of_a_completion_whose_prompt_opened_the_block():
    reward = Format(FormatConfig(opened=True))
    rest = "two</think><answer>4</answer>"
    assert reward(completions=[rest, f"<think>{rest}", RIGHT]) == [1, 0, 0]


def test_format_with_one_tag_and_text_after_it_is_trls():
    reward = Format(FormatConfig(tags=["think"], text_after=True))
    completions = ["<think>\na.\n</think>\nb.", "<think>\na.\nb.", "b <think>a</think>", "<think>a</think>"]
    assert reward(completions=completions) == [1, 0, 0, 1]


def test_format_takes_tags_literally_and_wants_each_name_once():
    assert Format(FormatConfig(tags=["a.b"]))(completions=["<a.b>x</a.b>", "<axb>x</axb>"]) == [1, 0]
    for tags in ([], ["a", "a"], [""]):
        with pytest.raises(ValidationError):
            FormatConfig(tags=tags)


def test_format_is_quick_on_a_hostile_completion():
    hostile = "<think>" + " </think" * 100_000 + "<answer>" * 100_000
    assert Format(FormatConfig())(completions=[hostile, "<think></think>" + " " * 100_000]) == [0, 0]


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
def test_format_goes_on_where_the_beginning_of_the_turn_ends(begun, completion, opened, expected):
    reward = Format(FormatConfig(opened=opened))
    question = {"role": "user", "content": "<think>?"}
    prompts = [[question, {"role": "assistant", "content": begun}], [question]]
    turns = [[{"role": "assistant", "content": text}] for text in (completion, RIGHT)]
    assert reward(prompts=prompts, completions=turns) == [expected, float(not opened)]
