"""Skips: each that is not in the table fails where that is asked for, in tests, marks and whole files alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import skips
from support.processes import run
from support.skips import EXPECTED

ROOT = Path(__file__).parents[3]
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_library')\n"
TESTS = """\
import unittest
import pytest


def test_one_that_runs(): ...


def test_says_so():
    pytest.skip("it rains")


@pytest.mark.skipif(True, reason="it snows")
def test_is_marked(): ...


@pytest.fixture
def weather():
    pytest.skip("it hails")


def test_asks_for_it(weather): ...


def test_raises():
    raise unittest.SkipTest("it thunders")


@pytest.mark.xfail(reason="known")
def test_fails_as_is_known():
    assert False
"""


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n1"]], ids=["in one process", "in a worker"])
def test_a_skip_that_is_not_in_the_table_fails_where_that_is_asked_for(
    tmp_path: Path, workers: list[str]
) -> None:
    for name, text in {
        "test_tests.py": TESTS,
        "test_whole_file.py": WHOLE_FILE,
        "pytest.ini": "[pytest]\n",
    }.items():
        (tmp_path / name).write_text(text)
    environment = {
        skips.VARIABLE: "1", "PYTHONPATH": str(ROOT / "tests"), "PYTEST_XDIST_WORKER": None,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    command = ("-m", "pytest", "-q", "-p", "support.skips", "-p", "no:cacheprovider", *workers)
    done = run(*command, "--continue-on-collection-errors", cwd=tmp_path, env=environment, cold=True)
    text = done.stdout
    assert "2 failed, 1 passed, 1 xfailed, 3 errors" in text.splitlines()[-1], text
    told = r"{} is skipped, which GRPOX_TESTS_STRICT=1 does not expect .*: (?:Skipped: )?{}"
    for name, reason in {
        "test_tests.py::test_says_so": "it rains", "test_tests.py::test_is_marked": "it snows",
        "test_tests.py::test_asks_for_it": "it hails", "test_tests.py::test_raises": "it thunders",
        "test_whole_file.py": "could not import 'no_such_library'",
    }.items():  # fmt: skip
        assert re.search(told.format(re.escape(name), reason), text), text


@pytest.mark.parametrize(("pattern", "reason"), EXPECTED)
def test_every_row_of_the_table_is_about_tests_that_are_there(pattern: str, reason: str) -> None:
    files = list(ROOT.glob(pattern.removesuffix("::*")))
    assert files
    words = reason.replace(".*", "").split(": ")[0].strip()
    sources = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("grpox/testing/*.py")]
    assert any(words in file.read_text(encoding="utf-8") for file in sources if file.name != "skips.py")
