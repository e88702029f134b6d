"""Tools: their descriptions for the model, their arguments as JSON, results and errors as text."""

import asyncio
import contextlib
import inspect
import json
import re
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field
from support.documented import documented
from support.problems import problem_of

from grpox.contracts import ToolCall
from grpox.environments import Environment, tool
from grpox.environments.calling import CallTimeout, settle
from grpox.environments.schemas import method_schema, tool_schema
from grpox.environments.tools import MOST_CHARACTERS, Tool, Toolbox, ToolProblem, method_tool, result_text


class Colour(Enum):
    RED = "red"


class Place(BaseModel):
    row: int = Field(ge=0)
    column: int = 0


@dataclass
class Pair:
    left: int
    right: str = "b"


def takes(
    number: int,
    text: str = "t",
    choice: Literal["a", "b"] = "a",
    items: list[float] | None = None,
    place: Place | None = None,
    day: date | None = None,
    colour: Colour = Colour.RED,
):
    return [number, text, choice, items, place, day, colour]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"number": 3}', {"number": 3}),
        ('{"number": "3", "text": "\\u00e9"}', {"number": 3, "text": "é"}),  # models write numbers as text
        ('{"number": 3, "items": [1, 2.5]}', {"number": 3, "items": [1.0, 2.5]}),
        ('{"number": 3, "place": {"row": 1}}', {"number": 3, "place": Place(row=1)}),
        ('{"number": 3, "day": "2026-11-25"}', {"number": 3, "day": date(2026, 11, 25)}),
        ('{"number": 3, "colour": "red"}', {"number": 3, "colour": Colour.RED}),
    ],
)
def test_arguments_are_read_as_the_types_of_the_signature(text, arguments):
    read = Tool("takes", takes).arguments(text)
    assert read == {**read, **arguments}
    assert takes(**read)[0] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "number: Missing required argument"),
        ("{number: 3}", "the arguments are not JSON: Expecting property name"),
        ("__import__('os').getcwd()", "the arguments are not JSON"),
        ('{"number": NaN}', "the arguments are not JSON: NaN is no number of JSON"),
        ('{"number": 3, "items": [1e999]}', "the arguments hold 1e999, which is too large for a number"),
        ('{"number": 3, "items": ["inf"]}', "items.0: Input should be a finite number"),
        ("[3]", "the arguments must be a JSON object"),
        ('{"number": "1+1"}', "number: Input should be a valid integer"),
        ('{"number": 3, "choice": "c"}', "choice: Input should be 'a' or 'b'"),
        ('{"number": 3, "where": 1}', "where: Unexpected keyword argument"),
        ('{"number": 3, "place": {"row": -1}}', "place.row: Input should be greater than or equal to 0"),
        ('{"a": 1, "b": 2, "c": 3, "d": 4}', "; 2 more"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_arguments_that_do_not_fit_are_described(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Tool("takes", takes).arguments(text)
    assert len(str(caught.value)) < 500


def test_a_type_that_json_has_none_of_is_refused():
    class Handle: ...

    def holds(handle: Handle): ...

    with pytest.raises(ToolProblem, match="has a parameter whose type cannot be read from JSON"):
        Tool("holds", holds)

    def refers(a: "Unknown"): ...  # noqa: F821

    with pytest.raises(ToolProblem, match="has a signature that cannot be read: NameError"):
        Tool("refers", refers)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("é\n", "é\n"),
        (None, "null"),
        ({"a": [1, (2, "é")]}, '{"a":[1,[2,"é"]]}'),
        (float("inf"), "Infinity"),
        (Place(row=2), '{"row":2,"column":0}'),
        (Pair(1), '{"left":1,"right":"b"}'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (np.float64(0.5), "0.5"),
        (np.array([[1, 2]]), "[[1,2]]"),
        ("x" * (MOST_CHARACTERS + 7), "x" * MOST_CHARACTERS + "... (7 further characters)"),
        ("half \ud800", "half ?"),  # a tokenizer takes no half of a surrogate pair
    ],
)
def test_text_is_the_result_as_it_is_and_anything_else_as_json(value, text):
    assert result_text(value) == text


# -- Calls of a turn -------------------------------------------------------------------------------------


class Stack(Environment):
    def __init__(self):
        self.log = []

    @tool
    def push(self, name: str):
        self.log.append(name)
        return ",".join(self.log)

    @tool
    async def wait(self, name: str, for_name: str = ""):
        self.log.append(name)
        while for_name and for_name not in self.log:
            await asyncio.sleep(0)
        return name

    @tool
    async def sleep(self):
        await asyncio.sleep(100)
        return "slept"

    @tool
    def raises(self):
        raise KeyError("no such key")

    @tool
    def late(self):
        raise CallTimeout

    @tool
    def full(self):
        raise MemoryError

    @tool
    def exits(self):
        raise SystemExit(2)

    @tool
    def strange(self):
        return object()


def run(*calls, max_calls=8):
    tools = {name: method_tool(Stack, name) for name in vars(Stack) if not name.startswith("_")}
    box = Toolbox(tools, Stack(), max_calls, 0.1, lambda _: contextlib.nullcontext())
    work = box.run([ToolCall(name, arguments) for name, arguments in calls])
    try:
        awaited = next(work)
        while True:
            ends = []
            asyncio.run(settle(awaited, 0.1, ends))
            awaited = work.send(ends)
    except StopIteration as end:
        return end.value


def named(name, **others):
    return json.dumps({"name": name, **others})


def test_async_tools_run_together_and_are_answered_in_the_order_of_the_calls():
    # Each ends only after the next has begun.
    answers = run(("wait", named("a", for_name="b")), ("wait", named("b", for_name="c")), ("wait", named("c")))
    assert [each.content for each in answers] == ["a", "b", "c"]


def test_a_sync_tool_sees_what_the_calls_before_it_have_done():
    answers = run(("wait", named("a")), ("push", named("b")), ("wait", named("c")), ("push", named("d")))
    assert [each.content for each in answers] == ["a", "a,b", "c", "a,b,c,d"]


def test_every_failure_is_an_error_text_and_harms_no_other_call():
    calls = {
        "pop": ("unknown", "Error: there is no tool 'pop'; there are: push, wait, sleep, raises"),
        "pish": ("unknown", "Error: there is no tool 'pish'; did you mean push?"),
        "raises": ("exception", "Error: raises raised KeyError: 'no such key'"),
        "late": ("timeout", "Error: late took longer than 0.1 s and was stopped"),
        "sleep": ("timeout", "Error: sleep took longer than 0.1 s and was stopped"),
        "full": ("memory", "Error: full needed more memory than it may use"),
        "push": ("arguments", "Error: push: name: Missing required argument; nam: Unexpected"),
        "strange": ("exception", "Error: strange returned no text and no JSON: "),
    }
    given = {"push": '{"nam": 1}'}
    *failed, last = run(*((name, given.get(name, "{}")) for name in calls), ("push", named("z")), max_calls=9)
    assert (last.failure, last.content) == ("", "z")
    for answer, (name, (failure, text)) in zip(failed, calls.items(), strict=True):
        assert answer.call.name == name
        assert answer.failure == failure
        assert answer.content.startswith(text)
    assert failed[4].seconds >= 0.1


def test_calls_beyond_the_limit_are_refused_and_not_run():
    answers = run(*[("push", named(name)) for name in "abcd"], max_calls=2)
    assert [each.failure for each in answers] == ["", "", "limit", "limit"]
    assert answers[1].content == "a,b"
    assert "at most 2" in answers[3].content


def test_an_exit_is_meant_for_the_process():
    with pytest.raises(SystemExit):
        run(("exits", ""))


# -- Descriptions ----------------------------------------------------------------------------------------


def search(query: str, limit: int = 3) -> str:
    """Search the notes.

    Args:
        query: words to look for.
        limit: most results.
    """
    return query * limit


def test_a_function_is_described_as_transformers_does():
    assert tool_schema(search, "find")["function"] == {
        "name": "find",
        "description": "Search the notes.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "words to look for."},
                "limit": {"type": "integer", "description": "most results."},
            },
            "required": ["query"],
        },
        "return": {"type": "string"},
    }


class Lake(Environment):
    @tool
    @documented
    def move(self, direction: Literal["up", "down"]) -> str: ...

    @tool
    async def wait(this) -> str:
        """Do nothing."""

    @tool
    @staticmethod
    @documented
    def add(a: int, b: int) -> int: ...

    @tool
    @classmethod
    def name(cls, long: bool) -> str:
        """Name the lake.

        Args:
            long: in full.
        """


def test_a_method_is_described_without_its_instance():
    names = ("move", "wait", "add", "name")
    parameters = {name: method_schema(Lake, name)["function"]["parameters"] for name in names}
    assert parameters["move"] == {
        "type": "object",
        "properties": {"direction": {"type": "string", "enum": ["up", "down"], "description": "what."}},
        "required": ["direction"],
    }
    assert parameters["wait"] == {"type": "object", "properties": {}}
    assert list(parameters["add"]["properties"]) == ["a", "b"]
    assert list(parameters["name"]["properties"]) == ["long"]


def undescribed(query: str, limit: int = 3) -> str: ...


def untyped(query) -> str: ...


def unknown(query: "Nowhere") -> str: ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "problem"),
    [(undescribed, "argument 'limit'"), (untyped, "query is missing a type hint"), (unknown, "'Nowhere'")],
)
def test_a_tool_that_cannot_be_described_is_named_with_file_line_and_cure(function, problem):
    function.__doc__ = "Search.\n\nArgs:\n    query: words."
    what = problem_of(tool_schema, function, "find", "tools[0]")
    assert "tool 'find' cannot be described to the model" in what.what
    assert problem in what.what
    assert what.where == f"{__file__}:{inspect.getsourcelines(function)[1]}"
    assert (what.key, "Literal" in what.allowed) == ("tools[0]", True)
