"""The kit finds nine in ten of the errors of planted/, written apart from it, and passes correct components."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from contract.planted.table import FOUND, MISSED, PLANTED, REDUCTIONS, Case, planted, twins

from grpox.testing.conformance import Conformance, Violation
from grpox.testing.runner import SUITES, Outcome, outcomes

SHARE = 0.9
"""The least part of the planted errors that is found."""
TWINS = list(twins())
COLUMNS = {"reward": {"answer": "42"}, "advantage": {"difficulty": 0.5}}


def suite_of(case: Case) -> Conformance:
    """Build the suite of a component, with the formula and columns that its author would give."""
    members: dict[str, Any] = {"component": case.component}
    if case.reference is not None:
        members["reference"] = staticmethod(case.reference)
    if case.reference in REDUCTIONS:
        members["reduction"] = staticmethod(REDUCTIONS[case.reference])
    if case.kind in COLUMNS:
        members["columns"] = COLUMNS[case.kind]
    return type("Suite", (SUITES[case.kind],), members)()


def failures(case: Case) -> Iterator[Outcome]:
    """Yield the checks that fail, as they come."""
    return (outcome for outcome in outcomes(suite_of(case)) if outcome.status == "failed")


@cache
def missed_errors() -> frozenset[tuple[str, str]]:
    """Return (family, class) of the planted components on which no check fails."""
    missed = set()
    for case in planted():
        with_failures = failures(case)
        if next(with_failures, None) is None:
            missed.add((case.family, case.name))
        with_failures.close()  # type: ignore[attr-defined]
    return frozenset(missed)


def table() -> str:
    """Write a line for each family: errors, those found, and the names of the others."""
    lines = []
    for family, kinds in PLANTED.items():
        names = [name for of_kind in kinds.values() for name in of_kind]
        missed = [name for name in names if (family, name) in missed_errors()]
        lines.append(f"{family:10}  {len(names) - len(missed):3} of {len(names):3}  {', '.join(missed)}")
    return "\n".join(lines)


def test_nine_in_ten_planted_errors_are_found() -> None:
    count = sum(1 for _ in planted())
    assert len(missed_errors()) <= (1 - SHARE) * count, f"\n{table()}"


def test_the_errors_that_are_not_found_are_those_listed() -> None:
    assert {name for _, name in missed_errors()} == set(MISSED), f"\n{table()}"


@pytest.mark.parametrize(("place", "check", "words"), FOUND)
def test_an_error_is_found_by_the_check_meant_for_it(place: str, check: str, words: str) -> None:
    family, kind, name = place.split("/")
    with pytest.raises(Violation) as violation:
        getattr(suite_of(Case(name, kind, family, PLANTED[family][kind][name])), f"test_{check}")()
    text = f"{violation.value.what}\n{violation.value.advice}"
    assert re.search(words, text), text


@pytest.mark.parametrize("case", TWINS, ids=[case.name for case in TWINS])
def test_a_correct_component_passes(case: Case) -> None:
    assert [(outcome.check, outcome.what) for outcome in failures(case)] == []
