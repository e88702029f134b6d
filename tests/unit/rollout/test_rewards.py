"""Reward functions as TRL users write them are called as they expect, and nothing bad passes for a score."""

import asyncio
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reward_tables import score

from grpox.config import RewardRef
from grpox.contracts import TrainerState
from grpox.errors import ConfigError, RunFailed
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.isolation import bind_rewards

STATE = TrainerState(global_step=3, max_steps=10, epoch=0.5)


def scored(*functions, completions=("ab", "abcd"), **columns):
    rewards = [NamedReward(f"f{place}", function) for place, function in enumerate(functions)]
    ids = [[1] * len(c) for c in completions]
    prompts = ["p"] * len(completions)
    return score(rewards, prompts, list(completions), ids, columns, STATE)


def test_a_function_that_takes_kwargs_gets_everything():
    seen = {}

    def by_length(completions, **kwargs):
        seen.update(kwargs)
        return [float(len(c)) for c in completions]

    assert scored(by_length, answer=["x", "y"]).values == [[2.0, 4.0]]
    assert set(seen) == {"prompts", "completion_ids", "answer", "trainer_state", "log_metric", "log_extra"}
    assert seen["completion_ids"] == [[1, 1], [1, 1, 1, 1]]
    assert seen["trainer_state"] is STATE


def test_a_function_without_kwargs_gets_what_it_names():
    def against_column(completions, ground_truth):
        return [1.0 if c == g else 0.0 for c, g in zip(completions, ground_truth, strict=True)]

    assert scored(against_column, ground_truth=["ab", "x"], other=[1, 2]).values == [[1.0, 0.0]]


def test_functions_run_where_a_loop_is_running_already_and_may_run_one_of_their_own():
    async def one(completions, **_):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    def plain(completions, **_):
        return asyncio.run(one(completions))

    async def notebook():
        return scored(one, plain).values

    assert asyncio.run(notebook()) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(
    "returned", [np.array([0.5, 2]), torch.tensor([0.5, 2.0]), [np.float32(0.5), 2], (0.5, 2)], ids=type
)
def test_numbers_of_numpy_and_torch_are_numbers(returned):
    assert scored(lambda **_: returned).values == [[0.5, 2.0]]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0], "1 scores for 2 completions"),
        ([1.0, math.nan], "nan (float) for completion 1"),
        ([math.inf, 1.0], "inf (float) for completion 0"),
        ([1.0, 1e300], "1e+300 (float) for completion 1"),
        ([1.0, "1"], "'1' (str) for completion 1"),
        (0.5, "0.5 (float), not a list of 2 numbers"),
        (None, "None, not a list"),
        ({0: 1.0, 1: 1.0}, "{0: 1.0, 1: 1.0} (dict), not a list"),
        ("ab", "'ab' (str), not a list"),
    ],
)
def test_what_is_no_list_of_scores_is_refused_by_name(returned, told):
    with pytest.raises(RunFailed, match=re.escape(told)) as caught:
        scored(lambda **_: returned)
    assert "'f0'" in str(caught.value)


def test_an_empty_batch_calls_nothing():
    def never(**_):
        raise AssertionError("called")

    assert scored(never, completions=()).values == [[]]


def test_a_generator_that_raises_as_it_is_read_is_a_failure_of_its_function():
    def lazily(completions, **_):
        return ({}["gone"] for _ in completions)

    with pytest.raises(RunFailed, match=r"reward 'f0' raised KeyError: 'gone'"):
        scored(lazily)


def lacking(columns, *functions):
    """The problems of binding functions to data with these columns."""
    data = SimpleNamespace(column_names=columns, data="the data")
    refs = [RewardRef(path=f"mine.py:f{place}") for place in range(len(functions))]
    with pytest.raises(ConfigError) as caught:
        bind_rewards(refs, functions, data)
    return caught.value.problems


def test_a_column_that_the_data_lacks_is_named_with_the_nearest():
    [problem] = lacking(
        ["answers"], lambda completions, **_: completions, lambda completions, answer: completions
    )
    assert problem.what == "reward 'f1' needs column 'answer', which the data lacks"
    assert problem.nearest == "answers"


def test_an_async_client_meets_one_event_loop_at_every_call():
    loops = set()

    async def client(completions, **_):
        loops.add(asyncio.get_running_loop())
        return [0.0] * len(completions)

    scored(client)
    scored(client)
    assert len(loops) == 1


@pytest.mark.filterwarnings("error")
def test_a_coroutine_is_closed_when_another_function_raises():
    kept = []

    async def never_awaited(completions, **_):
        return [0.0] * len(completions)

    def makes(**arguments):
        kept.append(never_awaited(**arguments))
        return kept[0]

    def broken(**_):
        raise OSError("down")

    with pytest.raises(RunFailed, match="'f1' raised OSError"):
        scored(makes, broken)
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        kept[0].send(None)


def test_a_dotted_name_reads_a_value_within_a_column():
    class Reads:
        reads_columns = ("model.truth.text", "a.b", "model.style")

        def __call__(self, completions, **columns):
            seen.update({name: columns[name] for name in self.reads_columns})
            return [0.0] * len(completions)

    seen = {}
    rows = [{"truth": {"text": "7"}}, {"truth": {"text": None}, "style": "rule"}, {"truth": "7"}, None]
    columns = {"model": rows, "a.b": [1, 2, 3, 4], "a": [{"b": 5}] * 4}
    score([NamedReward("reads", Reads())], ["p"] * 4, ["c"] * 4, [[1]] * 4, columns)
    assert seen == {
        "model.truth.text": ["7", None, None, None],
        "a.b": [1, 2, 3, 4],
        "model.style": [None, "rule", None, None],
    }
    names = ("truth.text", "style")
    expected = [f"reward 'f0' needs column 'model.{name}', which the data lacks" for name in names]
    assert [problem.what for problem in lacking(["a"], Reads())] == expected


@pytest.mark.parametrize(
    ("function", "is_chat_style"),
    [
        (lambda completions, **_: [len(each[0]["content"]) for each in completions], True),
        (lambda completions, **_: [len(each[-1]["content"]) for each in completions], True),
        (lambda completions, **_: [len(each[0].get("content")) for each in completions], True),
        (lambda completions, **_: [len(each["content"]) for each in completions], True),
        (lambda completions, **_: [1 / 0], False),
        (lambda completions, **_: [{}["content"]], False),
    ],
)
def test_a_function_for_messages_is_told_that_completions_are_strings(function, is_chat_style):
    for first in ("c", "") if is_chat_style else ("c",):
        with pytest.raises(RunFailed) as caught:
            score([NamedReward("chat", function)], ["p"] * 2, [first, "d"], [[1]] * 2, {})
        assert ("completions are strings here" in str(caught.value)) == is_chat_style
