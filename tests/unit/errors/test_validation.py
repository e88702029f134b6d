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


def test_keys_are_those_that_users_write():
    keys = told(many=[{}, {"depth": "x"}], by_name={"a": {"depth": "x"}}, one={"depth": "x"}, mode="x")
    assert set(keys) == {"loss.many[1].depth", "loss.by_name.a.depth", "loss.one.depth", "loss.mode"}
    assert set(told(key="", share=2)) == {"share"}
    assert told(share=1) == {"loss": Problem("share and ratio do not go together", "loss")}
    assert told(list="x")["loss.list"].allowed == "integer"
    assert "list" in told(listed=1)["loss.listed"].allowed.split(", ")


def test_an_unknown_key_of_a_nested_model_and_a_union_have_one_problem_each():
    problem = told(many=[{"dept": 2}])["loss.many[0].dept"]
    assert (problem.allowed, problem.nearest, problem.given) == ("depth", "depth", "2")
    problem = told(mode="autp")["loss.mode"]
    assert (problem.allowed, problem.nearest, problem.given) == ("integer or auto", "auto", "autp")
    assert problem.what.startswith("should be a valid integer")


def test_types_and_values_in_words() -> None:
    assert {name: allowed_values(field) for name, field in Outer.model_fields.items() if name != "listed"} == {
        "ratio": "number > 1 or null",
        "mode": "integer or auto",
        "many": "list of mapping with depth (length <= 3)",
        "by_name": "mapping of text to mapping with depth",
        "one": "mapping with depth or null",
        "colour": "red or blue",
        "share": "number >= 0 and <= 1",
        "anything": "anything",
    }
    values = (None, True, 0.2, "a", "", Colour.BLUE, [1])
    assert [written(value) for value in values] == ["null", "true", "0.2", "a", "''", "blue", "[1]"]
    assert len(written("x" * 1000)) == 100
