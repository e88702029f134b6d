"""The suite of environments: each fault is found by the check meant for it, and told by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

from grpox.testing import EnvironmentConformance, Violation
from grpox.testing.environment_player import example_calls
from grpox.testing.runner import outcomes

BROKEN = Path(__file__).with_name("broken_environments.py")
SuiteOf = Callable[..., EnvironmentConformance]


def suite_class(name: str, **own: Any) -> type[EnvironmentConformance]:
    return type(
        "Suite", (EnvironmentConformance,), {"component": {"path": f"{BROKEN}:{name}"}, "seconds": 0.5, **own}
    )


@pytest.fixture
def suite_of() -> Iterator[SuiteOf]:
    """``suite_of(name, **own)``: a suite, whose processes end with the test."""
    suites = []

    def make(name: str, **own: Any) -> EnvironmentConformance:
        suites.append(suite_class(name, **own)())
        return suites[-1]

    yield make
    for suite in suites:
        suite.teardown_class()


def violation(suite: EnvironmentConformance, check: str) -> Violation:
    with pytest.raises(Violation) as caught:
        getattr(suite, f"test_{check}")()
    return caught.value


def test_an_environment_that_keeps_its_contract_passes() -> None:
    suite = suite_class("Right", seconds=5.0, component={"path": f"{BROKEN}:Right", "goal": 2})()
    results = {each.check.removeprefix("test_"): each for each in outcomes(suite)}
    assert {check: each.what for check, each in results.items() if each.status != "passed"} == {}
    assert {"runs", "imports", "tools", "calls", "seeds", "state", "close", "state_keys"} <= results.keys()
    assert results["runs"].what == '2 turns; right 1; info {"success": true}'
    assert results["tools"].what == "tools: add"
    assert "depends on the seed" in results["seeds"].what


@pytest.mark.parametrize("name", ["Asynchronous", "OfTrl"])
def test_other_forms_pass(suite_of: SuiteOf, name: str) -> None:
    suite = suite_of(name, seconds=5.0)
    for check in ("runs", "tools", "calls", "seeds", "state", "close"):
        getattr(suite, f"test_{check}")()


@pytest.mark.parametrize(
    ("name", "check", "told"),
    [
        ("ToolHangs", "calls", "tool 'wait' takes longer than 0.5 s"),
        ("ToolHangsInspite", "calls", "tool 'wait': its process"),
        ("ToolPrints", "calls", "tool 'talk' prints"),
        ("ToolReturnsMuch", "calls", "tool 'read' returns 1,000,0"),
        ("ToolKills", "calls", "tool 'crash': its process"),
        ("ToolIsUndescribed", "tools", "tool 'move' cannot be described"),
        ("NothingToDo", "tools", "neither tools nor a method reply"),
        ("ResetHangs", "runs", "longer than 0.5 s in reset"),
        ("ResetNeedsAColumn", "runs", "KeyError: 'solution' in reset"),
        ("ResetByChance", "seeds", "the same seed gives another beginning"),
        ("AnswersByTime", "seeds", "another answer to turn 1"),
        ("RewardByChance", "seeds", "another outcome"),
        ("ReplyNeedsAWord", "odd_turns", "IndexError.* in reply"),
        ("ReplyPrints", "odd_turns", "an episode prints"),
        ("RewardIsNaN", "runs", "what reward returned is nan"),
        ("InfoHasAnObject", "runs", "thread.* is a _?MainThread"),
        ("OneTurnReward", "runs", "has 1 numbers for"),
        ("KeyIsAHash", "state_keys", "the same state has another key"),
        ("KeyIsAnObject", "runs", "state_key returned a object"),
        ("SharesItsState", "state", "beside another episode it answers otherwise"),
        ("ChangesItsRow", "row", "it changes the row"),
        ("CloseNeedsReset", "close", "close fails right after it was built: AttributeError"),
        ("LeavesAThread", "close", "closed after reset, it leaves the thread left over"),
        ("LeavesAProcess", "close", "closed after reset, it leaves the process"),
        ("LeavesAFile", "close", "closed right after it was built, it leaves the open file"),
    ],
)
def test_each_fault_is_told_by_name(suite_of: SuiteOf, name: str, check: str, told: str) -> None:
    assert re.search(told, violation(suite_of(name), check).what)


def test_calls_that_parse_does_not_find_and_tools_that_raise_are_told(suite_of: SuiteOf) -> None:
    with pytest.raises(SkipTest, match=r"add\(.*\) was not tried: parse finds no call"):
        suite_of("ReadsItsCalls", seconds=5.0).test_calls()
    suite = suite_of("ToolRaises")
    suite.test_calls()
    assert suite.notes[0].startswith('divide({"number": 1}): the model reads \'Error: divide raised')


def test_rows_of_the_suite_are_played(suite_of: SuiteOf) -> None:
    advice = violation(suite_of("ResetNeedsAColumn"), "runs").advice
    assert advice == "name rows and turns in example_rows and example_turns"
    suite_of("ResetNeedsAColumn", rows=({"prompt": "a", "solution": "b"},)).test_runs()


def test_torch_is_found(tmp_path: Path, suite_of: SuiteOf) -> None:
    file = tmp_path / "heavy.py"
    file.write_text("import torch\nfrom grpox.environments import Environment as Heavy\n")
    suite = suite_of("", component={"path": f"{file}:Heavy"})
    assert violation(suite, "imports").what == "it imports torch"


def test_examples_fit_the_description_of_a_tool() -> None:
    properties = {
        "how": {"type": "string", "enum": ["up", "down"]},
        "steps": {"type": "integer"},
        "names": {"type": "array", "items": {"type": "string"}},
        "limit": {"type": "number", "nullable": True},
        "either": {"type": ["boolean", "string"]},
    }
    schema = {"function": {"name": "go", "parameters": {"properties": properties}}}
    first, second = example_calls(schema)
    assert first.arguments == '{"how": "up", "steps": 1, "names": ["a"], "limit": 1.5, "either": true}'
    assert second.arguments == '{"how": "down", "steps": 0, "names": [], "limit": null, "either": false}'
    assert len(example_calls({"function": {"name": "go", "parameters": {}}})) == 1
