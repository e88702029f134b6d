"""The suites of datasets, optimizers and schedules: each fault is found by the check meant for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpox.testing.runner import SUITES, Outcome, outcomes

BROKEN = Path(__file__).with_name("broken_training.py")


def failed(kind: str, name: str) -> dict[str, Outcome]:
    suite = type("Suite", (SUITES[kind],), {"component": {"path": f"{BROKEN}:{name}"}})()
    made = {outcome.check.removeprefix("test_"): outcome for outcome in outcomes(suite)}
    return {check: outcome for check, outcome in made.items() if outcome.status == "failed"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("optimizer", "RightOptimizer"),
        ("optimizer", "Plain"),
        ("optimizer", "DeclaredNorm"),
        ("scheduler", "RightSchedule"),
        ("dataset", "RightData"),
        ("dataset", "Stream"),
    ],
)
def test_what_is_right_passes(kind: str, name: str) -> None:
    assert failed(kind, name) == {}


@pytest.mark.parametrize(
    ("kind", "name", "check", "told"),
    [
        ("optimizer", "OwnRate", "runs", "no group has it"),
        ("optimizer", "LeavesOutBiases", "runs", r"leaves out parameters of shapes \[\(4,\)\]"),
        ("optimizer", "Ascends", "direction", "along the gradient"),
        ("optimizer", "RemembersItsRate", "learning_rate", "moves weights"),
        ("optimizer", "CountsOutsideItsState", "state", "other steps"),
        ("optimizer", "DividesByNorm", "partitions", "on 1 rank it takes other steps"),
        ("optimizer", "NeedsMatrices", "partitions", "fails on a flat part"),
        ("scheduler", "BelowZero", "runs", "not finite and at least 0"),
        ("scheduler", "AlwaysZero", "runs", "has learning rate 0"),
        ("scheduler", "AboveTheRate", "learning_rate", "the largest rate is 1, more than"),
        ("scheduler", "EndsEarly", "runs", "step 6 of 12 raises IndexError"),
        ("scheduler", "Forgets", "restart", "restarted after step 1"),
        ("scheduler", "FirstGroupOnly", "groups", "before step 2 two groups"),
        ("dataset", "AList", "runs", r"load\(\) returned a list"),
        ("dataset", "NoRows", "runs", "no row"),
        ("dataset", "NoPrompts", "runs", "no column 'prompt' but question, answer"),
        ("dataset", "EmptyPrompt", "prompts", "neither text nor messages"),
        ("dataset", "TakesAnArgumentsName", "columns", "column 'completions'"),
        ("dataset", "Shuffles", "same_rows", "other rows"),
        ("dataset", "OfItsProcess", "other_process", "on rank 1 it has other rows"),
    ],
)
def test_each_fault_is_found_by_the_check_meant_for_it(kind: str, name: str, check: str, told: str) -> None:
    assert re.search(told, failed(kind, name)[check].what)
