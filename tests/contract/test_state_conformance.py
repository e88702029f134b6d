"""The check of a component's state in the conformance suites: each fault is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpox.testing.conformance import Conformance, Violation
from grpox.testing.runner import SUITES

BROKEN = Path(__file__).with_name("broken_states.py")


def suite_of(kind: str, name: str) -> Conformance:
    return type("Suite", (SUITES[kind],), {"component": {"path": f"{BROKEN}:{name}"}})()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("loss", "RightQuantile"),
        ("advantage", "RightRunningStd"),
        ("reward", "RightReward"),
        ("correction", "RightSchedule"),
    ],
)
def test_a_right_state_passes(kind: str, name: str) -> None:
    suite_of(kind, name).test_state()


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("loss", "LeavesOut", "goes on otherwise than the original"),
        ("loss", "LoadsNothing", "returns another one, at ['cap']"),
        ("loss", "SavesNumpy", "['mean'] is a numpy.float64"),
        ("loss", "FollowsNan", "makes its state NaN for ever"),
        ("loss", "FailsOnNothing", "end_step raises for a step that was skipped: RuntimeError"),
        ("loss", "CountsTokens", "calls on other rows leave another state, at ['mean']"),
        ("advantage", "Rounds", "goes on otherwise than the original"),
        ("reward", "LoadsOther", "returns another one, at ['calls']"),
    ],
)
def test_each_fault_of_a_state_is_found(kind: str, name: str, words: str) -> None:
    with pytest.raises(Violation) as violation:
        suite_of(kind, name).test_state()
    assert words in violation.value.what


def test_the_state_is_checked_last() -> None:
    names = [check.name for check in suite_of("advantage", "RightRunningStd").checks()]
    assert names[0] == "test_runs"
    assert names[-1] == "test_state"
