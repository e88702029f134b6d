"""The contract of the kind; scores by hand and beside reasoning-gym's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grpox.testing import RewardConformance

from grpox_reasoning_gym.config import RewardConfig, SourceConfig, tasks
from grpox_reasoning_gym.reward import ReasoningGymReward
from grpox_reasoning_gym.rows import Row, rows

ENTRY = {"question": "What is 5 + 7?", "answer": "12", "metadata": {}}
SUM: Row = {"task": "chain_sum", "settings": "{}", "entry": json.dumps(ENTRY)}


[ROW] = rows(SourceConfig(tasks="chain_sum", size=1))


class TestReasoningGymReward(RewardConformance):
    component = "reasoning-gym"
    completions = (f"So <answer>{ROW['answer']}</answer>.", "<answer>-1</answer>", ROW["answer"], "")
    columns = ROW


def scores(
    completions: list[Any], row: Row = SUM, answer: str = "tags", **arguments: Any
) -> list[float | None]:
    reward = ReasoningGymReward(RewardConfig.model_validate({"answer": answer}))
    columns = {name: [row[name]] * len(completions) for name in ("task", "settings", "entry")}
    return reward(completions=completions, **columns, **arguments)


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("<answer>12</answer>", "tags", 1.0),
        ("<answer>5</answer> no, <answer> +12.0 </answer>.", "tags", 1.0),  # the last one, as a number
        ("<answer>12 of</answer>", "tags", 0.4),  # two letters of five
        ("12", "tags", 0.0),
        ("5 and 7 are\n 12 \n\n", "last-line", 1.0),
        ("12\nI think", "last-line", 0.0),
        (" 12\n", "whole", 1.0),
        ("is 12", "whole", 0.4),
        (" ", "whole", 0.0),
    ],
)
def test_the_config_says_where_the_answer_stands(completion: str, answer: str, score: float) -> None:
    assert scores([completion], answer=answer) == [pytest.approx(score)]


@pytest.mark.parametrize(
    "entry", [None, "42", "no JSON", '{"answer": "12"}', json.dumps([ENTRY])], ids=lambda entry: str(entry)[:9]
)
def test_rows_of_other_data_get_no_score(entry: str | None) -> None:
    assert scores(["<answer>12</answer>"], SUM | {"entry": entry}) == [None]
    assert scores(["<answer>12</answer>"], {"task": None, "settings": None, "entry": None}) == [None]


def test_an_answer_on_which_the_scorer_fails_scores_nothing() -> None:
    [row] = rows(SourceConfig(tasks="prime_factorization", size=1))
    assert scores(["<answer>garbage</answer>"], row) == [0.0]


def test_a_scorer_has_the_settings_of_its_row() -> None:
    entry = {"question": "?", "answer": "0.333", "metadata": {}}
    task = {"task": "decimal_arithmetic", "entry": json.dumps(entry)}
    coarse, fine = (task | {"settings": json.dumps({"max_num_decimal_places": places})} for places in (3, 6))
    assert scores(["<answer>0.3334</answer>"], coarse) == [1.0]
    assert scores(["<answer>0.3334</answer>"], fine) == [0.0]


def test_the_mean_of_each_task_is_logged_of_conversations_too() -> None:
    logged: dict[str, float] = {}
    message = {"role": "assistant", "content": "<answer>12</answer>"}
    scores([[message], "none"], log_metric=logged.__setitem__)
    assert logged == {"reasoning-gym/chain_sum": 0.5}


def test_the_own_answer_of_every_task_is_right() -> None:
    names = sorted(tasks())
    answered = [row for row in rows(SourceConfig(tasks=names, size=len(names))) if row["answer"] is not None]
    # A right answer is any that fits, in five tasks at most: then there is none to compare.
    assert len(answered) >= len(names) - 5
    got = {row["task"]: scores([f"<answer>{row['answer']}</answer>"], row) for row in answered}
    assert {task: score for task, score in got.items() if score != [1.0]} == {}
