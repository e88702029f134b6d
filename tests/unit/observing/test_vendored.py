"""The copy of uPlot in the package is the one that its record names."""

from __future__ import annotations

import hashlib
import json
from importlib import resources

import pytest

VENDOR = resources.files("grpox.observing.page") / "vendor"
RECORD = json.loads((VENDOR / "vendor.json").read_text())


def test_the_folder_holds_the_recorded_files_and_no_others() -> None:
    files = {entry.name for entry in VENDOR.iterdir()}
    assert files == {"vendor.json", "uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}
    assert RECORD["files"].keys() == files - {"vendor.json"}


@pytest.mark.parametrize("name", sorted(RECORD["files"]))
def test_a_file_has_its_recorded_hash(name: str) -> None:
    assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == RECORD["files"][name]


def test_the_record_names_the_version_that_the_file_names() -> None:
    assert f"(v{RECORD['version']})" in (VENDOR / "uPlot.iife.min.js").read_text()[:200]
    assert RECORD["url"].endswith(f"/uplot-{RECORD['version']}.tgz")
