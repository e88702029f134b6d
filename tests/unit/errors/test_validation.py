"""pydantic's errors in a run file's words."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from grpox.errors import Problem
from grpox.errors.validation import allowed_values, problems_of, written


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    depth: int = 1


class Outer(BaseModel):
    ratio: float | None = Field(None, gt=1)
    mode: int | Literal["auto"] = "auto"
    many: list[Inner] = Field(default=[], max_length=3)
    by_name: dict[str, Inner] = Field(default_factory=dict)
    one: Inner | None = None
    colour: Colour = Colour.RED
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    anything: Any = None
    listed: int = Field(0, alias="list")

    @model_validator(mode="after")
    def _consistent(self) -> Outer:
        if self.share == 1:
            raise ValueError("share and ratio do not go together")
        return self


def told(key: str = "loss", **data: Any) -> dict[str, Problem]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data, extra="forbid")
    problems = problems_of(caught.value, Outer, key)
    by_key = {problem.key: problem for problem in problems}
    assert len(by_key) == len(problems)
    return by_key


def test_keys_are_dotted_through_lists_mappings_and_optionals_without_union_tags():
    keys = told(many=[{}, {"depth": "x"}], by_name={"a": {"depth": "x"}}, one={"depth": "x"}, mode="x")
    assert set(keys) == {"loss.many[1].depth", "loss.by_name.a.depth", "loss.one.depth", "loss.mode"}
    assert set(told(key="", share=2)) == {"share"}


def test_an_unknown_key_of_a_nested_model_is_told_with_that_models_keys():
    problem = told(many=[{"dept": 2}])["loss.many[0].dept"]
    assert (problem.allowed, problem.nearest, problem.given) == ("depth", "depth", "2")


def test_one_problem_for_all_members_of_a_union():
    problem = told(mode="autp")["loss.mode"]
    assert (problem.allowed, problem.nearest, problem.given) == ("integer or auto", "auto", "autp")
    assert problem.what.startswith("should be a valid integer")


def test_a_models_own_rule_stands_at_its_key_in_its_own_words():
    assert told(share=1) == {"loss": Problem("share and ratio do not go together", "loss")}


def test_an_alias_is_the_key_that_users_write():
    assert told(list="x")["loss.list"].allowed == "integer"
    assert "list" in told(listed=1)["loss.listed"].allowed.split(", ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ratio", "number > 1 or null"),
        ("mode", "integer or auto"),
        ("many", "list of mapping with depth (length <= 3)"),
        ("by_name", "mapping of text to mapping with depth"),
        ("colour", "red or blue"),
        ("share", "number >= 0 and <= 1"),
        ("anything", "anything"),
    ],
)
def test_types_in_words(name, words):
    assert allowed_values(Outer.model_fields[name]) == words


def test_values_as_written_in_yaml():
    assert [written(value) for value in (None, True, 0.2, "a", "", Colour.BLUE, [1])] == [
        "null",
        "true",
        "0.2",
        "a",
        "''",
        "blue",
        "[1]",
    ]
    assert len(written("x" * 1000)) == 100
