"""The kit finds nine in ten of the errors of planted/, written apart from it, and passes correct components."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from contract.planted.table import CORRECT, FAMILIES, FOUND, MISSED, Case, cases

from grpox.testing.conformance import Conformance, Violation
from grpox.testing.runner import SUITES, Outcome, outcomes

SHARE = 0.9
"""The least part of the planted errors that is found."""
PLANTED = {f"{case.family}/{case.kind}/{case.name}": case for case in cases(*FAMILIES)}
TWINS = list(cases(*CORRECT))
COLUMNS = {"reward": {"answer": "42"}, "advantage": {"difficulty": 0.5}}


def suite_of(case: Case) -> Conformance:
    """Build the suite of a component, with the formula and columns that its author would give."""
    members: dict[str, Any] = {"component": case.component}
    if case.formula is not None:
        members["reference"] = staticmethod(case.formula)
    if case.reduction is not None:
        members["reduction"] = staticmethod(case.reduction)
    if case.kind in COLUMNS:
        members["columns"] = COLUMNS[case.kind]
    return type("Suite", (SUITES[case.kind],), members)()


def failures(case: Case) -> Iterator[Outcome]:
    """Yield the checks that fail, as they come."""
    return (outcome for outcome in outcomes(suite_of(case)) if outcome.status == "failed")


@cache
def missed_errors() -> frozenset[str]:
    """Return the planted components on which no check fails."""
    missed = set()
    for place, case in PLANTED.items():
        with_failures = failures(case)
        if next(with_failures, None) is None:
            missed.add(place)
        with_failures.close()  # type: ignore[attr-defined]
    return frozenset(missed)


def test_nine_in_ten_planted_errors_are_found_and_the_others_are_listed() -> None:
    assert (len(PLANTED), len(TWINS)) == (174, 46)
    assert len(missed_errors()) <= (1 - SHARE) * len(PLANTED), sorted(missed_errors())
    assert {place.rpartition("/")[2] for place in missed_errors()} == set(MISSED)


@pytest.mark.parametrize(("place", "check", "words"), FOUND)
def test_an_error_is_found_by_the_check_meant_for_it(place: str, check: str, words: str) -> None:
    with pytest.raises(Violation) as violation:
        getattr(suite_of(PLANTED[place]), f"test_{check}")()
    text = f"{violation.value.what}\n{violation.value.advice}"
    assert re.search(words, text), text


@pytest.mark.parametrize("case", TWINS, ids=[case.name for case in TWINS])
def test_a_correct_component_passes(case: Case) -> None:
    assert [(outcome.check, outcome.what) for outcome in failures(case)] == []
