"""The conformance suite of generators: hf passes, and each fault is found by the check meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpox.testing import GeneratorConformance
from grpox.testing.runner import Outcome, outcomes

BROKEN = Path(__file__).with_name("broken_generators.py")


def checked(component: str | dict[str, object]) -> dict[str, Outcome]:
    suite = type("Suite", (GeneratorConformance,), {"component": component})
    return {outcome.check.removeprefix("test_"): outcome for outcome in outcomes(suite())}


def failed(name: str) -> dict[str, Outcome]:
    made = checked({"path": f"{BROKEN}:{name}"})
    return {check: outcome for check, outcome in made.items() if outcome.status == "failed"}


@pytest.mark.parametrize("component", ["hf", {"name": "hf", "gather_weights": False}])
def test_hf_conforms(component: str | dict[str, object]) -> None:
    made = checked(component)
    assert made.pop("ahead").status == "skipped"
    assert {outcome.status for outcome in made.values()} == {"passed"}


def test_what_is_right_passes() -> None:
    assert failed("Right") == {}
    assert {o.status for o in checked({"path": f"{BROKEN}:Ahead"}).values()} == {"passed"}


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("CountsFromOne", "runs"),
        ("DropsTheEnd", "ends"),
        ("AlwaysStops", "ends"),
        ("OtherTemperature", "log_probabilities"),
        ("NoLogprobs", "log_probabilities"),
        ("IgnoresSeed", "seeds"),
        ("GlobalNumbers", "seeds"),
        ("NeverGreedy", "greedy"),
        ("OldWeights", "versions"),
        ("OldVersion", "versions"),
        ("ForgetsAsleep", "sleep_and_wake"),
        ("BeginsWhenRead", "ahead"),
    ],
)
def test_each_fault_is_found_by_the_check_meant_for_it(name: str, check: str) -> None:
    assert check in failed(name)
