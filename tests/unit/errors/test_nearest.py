"""The name that an unknown one probably means: by its initials, its spelling, or as a part of it."""

from __future__ import annotations

import pytest

from grpox.config import AlarmsConfig, SamplingConfig, TrainConfig
from grpox.errors import nearest, nearest_spelling, nearest_whole


@pytest.mark.parametrize(
    ("name", "candidates", "near"),
    [
        ("kl", AlarmsConfig.model_fields, "kl_runaway"),
        ("entropy", AlarmsConfig.model_fields, "entropy_gone"),
        ("KL", AlarmsConfig.model_fields, "kl_runaway"),
        ("lr", TrainConfig.model_fields, "learning_rate"),
        ("lr", ["lora", "learning_rate", "lr_scheduler_type"], "learning_rate"),
        ("temprature", SamplingConfig.model_fields, "temperature"),
        ("temp", SamplingConfig.model_fields, "temperature"),
        # The shortest of several, and the beginning before the middle.
        ("math", ["a_long_math", "math_verify_strict", "math_verify"], "math_verify"),
        ("final answer", ["the-final_answer"], "the-final_answer"),
        ("org/judge", ["other/judge_of_all_answers"], ""),
        # Letters within a word, single letters and nothing are no part of a name.
        ("una", AlarmsConfig.model_fields, ""),
        ("k", ["kl_runaway", "top_k"], ""),
        ("", ["kl_runaway"], ""),
        ("kl", [], ""),
    ],
)
def test_the_nearest_name(name: str, candidates: list[str], near: str) -> None:
    assert nearest(name, candidates) == near


def test_a_part_of_a_name_is_no_misspelling_of_it() -> None:
    assert nearest_spelling("kl", AlarmsConfig.model_fields) == ""
    assert nearest_spelling("temprature", SamplingConfig.model_fields) == "temperature"
    assert nearest_whole("temprature", SamplingConfig.model_fields) == ""
