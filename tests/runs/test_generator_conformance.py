"""The conformance suite of generators: hf passes, and each fault is found by the check meant for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpox.testing import GeneratorConformance
from grpox.testing.conformance import Check
from grpox.testing.runner import Outcome, outcomes

BROKEN = Path(__file__).with_name("broken_generators.py")


def checked(component: str | dict[str, object], only: tuple[str, ...] = ()) -> dict[str, Outcome]:
    """The outcomes of the whole suite, or of some of its checks."""

    class Suite(GeneratorConformance):
        def checks(self) -> Iterator[Check]:
            every = super().checks()
            return (check for check in every if not only or check.name.removeprefix("test_") in only)

    Suite.component = component
    return {outcome.check.removeprefix("test_"): outcome for outcome in outcomes(Suite())}


def failed(name: str, *only: str) -> set[str]:
    made = checked({"path": f"{BROKEN}:{name}"}, only)
    assert made.keys() >= set(only)
    return {check for check, outcome in made.items() if outcome.status == "failed"}


@pytest.mark.parametrize("component", ["hf", {"name": "hf", "gather_weights": False}])
def test_hf_conforms(component: str | dict[str, object]) -> None:
    made = checked(component)
    assert made.pop("ahead").status == "skipped"
    assert {outcome.status for outcome in made.values()} == {"passed"}


def test_what_is_right_passes() -> None:
    assert failed("Right") == set()
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
    """After the check that the generator runs, without which no other is made."""
    assert check in failed(name, "runs", check)
