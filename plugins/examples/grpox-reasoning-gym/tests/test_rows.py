"""The rows of the source, and errors of its parameters."""

from __future__ import annotations

import re
from collections import Counter
from random import Random
from typing import Any

import pytest
from grpox.errors import ConfigError
from pydantic import ValidationError
from reasoning_gym import create_dataset

from grpox_reasoning_gym.config import SYSTEM_PROMPT, SourceConfig
from grpox_reasoning_gym.rows import ReasoningGymSource, read_entry, rows, shares

SUMS = {
    "task": "basic_arithmetic",
    "settings": {"min_terms": 2, "max_terms": 2, "operators": ["+"], "allow_parentheses": False},
}


def source(tasks: Any = "chain_sum", **parameters: Any) -> SourceConfig:
    return SourceConfig(tasks=tasks, **{"size": 8} | parameters)


def message_of(**parameters: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        source(**parameters)
    return "; ".join(error["msg"] for error in caught.value.errors())


@pytest.mark.parametrize("tasks", ["lcm", ["lcm"], {"task": "lcm"}])
def test_one_task_has_short_forms(tasks: Any) -> None:
    assert source(tasks) == source([{"task": "lcm", "weight": 1.0, "settings": {}}])


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("chan_sum", {}, "did you mean 'chain_sum'?"),
        ("chain_sum", {"min_term": 2}, "chain_sum has no setting 'min_term'; did you mean 'min_terms'?"),
        ("lcm", {"zzz": 2}, "it has min_numbers, max_numbers, min_value, max_value"),
        ("lcm", {"seed": 1}, "seed is a key of the source"),
        ("composite", {}, "reasoning-gym has no task of this name"),  # `tasks` is a mixture itself
    ],
)
def test_an_unknown_task_or_setting_is_refused_with_a_suggestion(
    task: str, settings: Any, message: str
) -> None:
    assert message in message_of(tasks={"task": task, "settings": settings})


@pytest.mark.parametrize("tasks", [[], {"task": "lcm", "weight": 0}, {"task": "lcm", "wieght": 1}, 3])
def test_an_invalid_mixture_is_refused(tasks: Any) -> None:
    assert message_of(tasks=tasks)


@pytest.mark.parametrize(
    ("config", "key", "message"),
    [
        (
            source({"task": "chain_sum", "settings": {"min_terms": 9, "max_terms": 2}}),
            "data.source.tasks.0.settings",
            "chain_sum refuses its settings: max_terms must be >= min_terms",
        ),
        (
            source(template="{sum}"),
            "data.source.template",
            "difficulty, expression, num_digits, num_terms, question, source_dataset, source_index",
        ),
    ],
    ids=["settings", "template"],
)
def test_a_problem_of_the_rows_has_its_key(config: SourceConfig, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rows(config)
    [problem] = caught.value.problems
    assert problem.key == key
    assert message in (problem.what, problem.allowed)


def test_a_row_has_what_rewards_need() -> None:
    row = rows(source(SUMS, size=1))[0]
    assert list(row) == ["prompt", "answer", "task", "settings", "entry"]
    entry = read_entry(row["entry"])
    first, second = entry["metadata"]["expression"].split(" + ")
    assert int(row["answer"]) == int(first) + int(second)
    assert row["prompt"] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"Calculate {first} + {second}."},
    ]
    assert row["task"] == "basic_arithmetic"


def test_a_template_replaces_the_question() -> None:
    otherwise = {"system_prompt": None, "template": "{expression}=", "replace": {" ": ""}}
    row = rows(source(SUMS, conversation=False, **otherwise))[0]
    assert row["prompt"] == read_entry(row["entry"])["metadata"]["expression"].replace(" ", "") + "="


def test_a_system_prompt_is_a_paragraph_before_a_text_and_may_be_left_out() -> None:
    row = rows(source(conversation=False, system_prompt="Be brief."))[0]
    assert row["prompt"].startswith("Be brief.\n\nState the final answer")
    assert [message["role"] for message in rows(source(system_prompt=None))[0]["prompt"]] == ["user"]


def test_the_same_seed_gives_the_same_rows_and_its_neighbour_others() -> None:
    first, again, other = (rows(source(SUMS, size=100, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    # Of reasoning-gym's own seeds 0 and 1, 99 rows of 100 would be the same.
    one, two = ({row["entry"].partition('"metadata"')[0] for row in each} for each in (first, other))
    assert len(one & two) < 10


def test_tasks_are_mixed_by_weight_in_any_order() -> None:
    mixture = ["lcm", {"task": "gcd", "weight": 2}, {"task": "chain_sum", "weight": 0.5}]
    tasks = [row["task"] for row in rows(source(mixture, size=70))]
    assert Counter(tasks) == {"lcm": 20, "gcd": 40, "chain_sum": 10}
    assert len(set(tasks[:10])) > 1
    assert shares(10, [1, 1, 1]) == [3, 4, 3]


def test_the_source_loads_a_dataset() -> None:
    loaded = ReasoningGymSource(source(["lcm", "graph_color"])).load()
    assert loaded.column_names == ["prompt", "answer", "task", "settings", "entry"]
    assert len(loaded) == 8
    answers = {row["task"]: row["answer"] for row in loaded}
    assert answers["graph_color"] is None
    assert answers["lcm"].isdigit()


def test_an_entry_comes_back_with_its_tuples_and_keys() -> None:
    # Scorers compare the tuples of the one, and look up the integers of the other.
    for task in ("arc_agi", "graph_color"):
        settings = SourceConfig(tasks=task, size=1)
        [row] = rows(settings)
        seed = Random(f"0 0 {task}").getrandbits(31)
        entry = read_entry(row["entry"])
        assert repr(entry) == repr(dict(create_dataset(task, seed=seed, size=1)[0]))
        assert re.search(r"\(\d|\{0:", repr(entry))
