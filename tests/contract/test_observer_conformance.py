"""The conformance suite of observers: each fault is found by the check meant for it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.mlflow_store import migrated_store

from grpox.testing import ObserverConformance, observers
from grpox.testing.conformance import Conformance
from grpox.testing.runner import Outcome, outcomes

BROKEN = Path(__file__).with_name("broken_observers.py")


def failed(component: str | dict[str, str]) -> dict[str, Outcome]:
    suite = type("Suite", (ObserverConformance,), {"component": component})
    made = {outcome.check.removeprefix("test_"): outcome for outcome in outcomes(suite())}
    return {check: outcome for check, outcome in made.items() if outcome.status == "failed"}


def test_the_tracker_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = observers._folder

    @contextmanager
    def folder_with_a_store() -> Iterator[Path]:
        with run_folder() as folder:
            migrated_store(Path.cwd())
            yield folder

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(observers, "_folder", folder_with_a_store)
    assert failed("mlflow") == {}


def test_what_is_right_passes() -> None:
    assert failed({"path": f"{BROKEN}:Right"}) == {}


def test_a_path_may_be_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BROKEN.parent)
    assert failed({"path": f"{BROKEN.name}:Right"}) == {}


def test_a_check_in_which_the_component_exits_has_failed() -> None:
    class Exits(Conformance):
        def test_runs(self) -> None:
            """Runs."""
            sys.exit(0)

    [outcome] = outcomes(Exits())
    assert outcome.status == "failed"
    assert outcome.what.startswith("SystemExit: 0 (test_observer_conformance.py:")


@pytest.mark.parametrize(
    ("name", "check", "told"),
    [
        ("WantsMore", "runs", "no such server"),
        ("DividesByRewards", "runs", "grpox_rollouts_scored: TypeError"),
        ("FailsOnFailure", "failed_runs", "grpox_run_failed: IndexError"),
        ("FormatsIntegers", "odd_numbers", "NaN"),
    ],
)
def test_each_fault_is_found_by_the_check_meant_for_it(name: str, check: str, told: str) -> None:
    assert re.search(told, failed({"path": f"{BROKEN}:{name}"})[check].what)
