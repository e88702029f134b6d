"""The order of the test files: dearest first, so that no worker is left with a long one at the end.

Files stay whole. ``GRPOX_TESTS_ORDER=SEED`` shuffles them (``random`` draws a seed), and the first lines of a
session say which. ``--save-durations`` writes what each took to durations.json, from which the usual order
comes.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of each file, by its path in the repository."""
VARIABLE = "GRPOX_TESTS_ORDER"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--save-durations", action="store_true", help="write durations.json")


def pytest_configure() -> None:
    if os.environ.get(VARIABLE) == "random":
        os.environ[VARIABLE] = str(random.SystemRandom().randrange(1_000_000))  # the workers are told the same


def pytest_report_header() -> list[str]:
    seed = os.environ.get(VARIABLE)
    return [f"order of files: {VARIABLE}={seed}" if seed else "order of files: dearest first"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    files = list(dict.fromkeys(_file(item.nodeid) for item in items))
    if seed := os.environ.get(VARIABLE):
        random.Random(int(seed)).shuffle(files)
    else:
        files.sort(key=lambda file: -known.get(file, 0.0))
    place = {file: number for number, file in enumerate(files)}
    items.sort(key=lambda item: place[_file(item.nodeid)])


_seconds: Counter[str] = Counter()
"""Time that each file takes."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[_file(report.nodeid)] += report.duration  # type: ignore[assignment]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--save-durations") and not hasattr(session.config, "workerinput"):
        known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        known |= {file: round(seconds, 1) for file, seconds in _seconds.items()}
        there = {file: known[file] for file in sorted(known) if (DURATIONS.parents[2] / file).exists()}
        DURATIONS.write_text(json.dumps(there, indent=1) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
