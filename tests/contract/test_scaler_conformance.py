"""The conformance suites of advantages and corrections: each fault is found by the check meant for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpox.plugins.registry import installed
from grpox.testing.runner import SUITES, Outcome, outcomes

BROKEN = Path(__file__).with_name("broken_scalers.py")
INSTALLED = sorted(
    {(o.kind, o.qualified_name) for o in installed().plugins.offers if o.kind in ("advantage", "correction")}
)


def failed(kind: str, component: str | dict[str, str]) -> dict[str, Outcome]:
    suite = type("Suite", (SUITES[kind],), {"component": component})()
    made = {outcome.check.removeprefix("test_"): outcome for outcome in outcomes(suite)}
    return {check: outcome for check, outcome in made.items() if outcome.status == "failed"}


@pytest.mark.parametrize(("kind", "name"), INSTALLED)
def test_every_installed_one_conforms(kind: str, name: str) -> None:
    assert failed(kind, name) == {}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("advantage", name) for name in ("Right", "OfInputs", "OfTurns", "OfTokens")),
        ("advantage", "DeclaredWrongSign"),
        ("advantage", "OfTheirDevice"),
        ("correction", "RightCorrection"),
        ("correction", "DeclaredInverted"),
    ],
)
def test_what_is_right_passes(kind: str, name: str) -> None:
    assert failed(kind, {"path": f"{BROKEN}:{name}"}) == {}


@pytest.mark.parametrize(
    ("name", "check", "told"),
    [
        ("OneNumber", "runs", "one number for each"),
        ("ScalesInPlace", "pure", "in place"),
        ("PairsOfRows", "order_of_rows", "by group_ids"),
        ("NamesAsPlaces", "names_of_groups", "numbers of groups"),
        ("DividesBySpread", "groups_of_one_reward", "not all finite"),
        ("IgnoresAbstentions", "abstentions", "without a score"),
        ("IgnoresWeights", "weight_of_zero", "weight 0"),
        ("WrongSign", "direction", "smaller advantage"),
        ("Distance", "direction", "not around 0|smaller advantage"),
        ("OnlyZeros", "direction", "not around 0"),
        ("EqualWeights", "weights", "other weights"),
        ("MeanOfFunctions", "weights", "abstained from all"),
        ("CountsTheUnscored", "unscored_completions", "nobody scored"),
        ("OfTheCpu", "device", "mixes"),
        ("OneForAllTurns", "turns", "one number per turn"),
        ("TurnsAsSums", "signal", "equal rewards in different turns .*"),
        ("EnlargesRounding", "signal", "a group of equal rewards has advantages of 7e-05"),
    ],
)
def test_each_fault_of_an_advantage_is_found(name: str, check: str, told: str) -> None:
    outcome = failed("advantage", {"path": f"{BROKEN}:{name}"})[check]
    assert re.search(told, f"{outcome.what}\n{outcome.advice}")
    assert "group " in outcome.example


@pytest.mark.parametrize(
    ("name", "check", "told"),
    [
        ("WeightsAlone", "runs", r"\(weights, keep\)"),
        ("CarriesGradient", "runs", "gradient"),
        ("ChangesSampler", "pure", "in place"),
        ("NeverOne", "identity", "weigh by 1"),
        ("NeverOne", "missing_log_probabilities", "weigh by 1"),
        ("CountsPadding", "padding", "padding"),
        ("NormalisesOverRows", "rows_are_independent", "by itself"),
        ("Overflows", "extreme_differences", "not finite"),
        ("NeedsAToken", "all_masked", "raised"),
        ("Inverted", "direction", "weighs"),
        ("OfTheCpuToo", "device", "mixes"),
    ],
)
def test_each_fault_of_a_correction_is_found(name: str, check: str, told: str) -> None:
    outcome = failed("correction", {"path": f"{BROKEN}:{name}"})[check]
    assert re.search(told, f"{outcome.what}\n{outcome.advice}")
    assert "sampler" in outcome.example
