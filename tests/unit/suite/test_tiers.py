"""A change asks for the folders that see it, no source is forgotten, and each golden file has its test."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support import golden, tiers

FILES = subprocess.run(
    ["git", "ls-files"], cwd=tiers.ROOT, capture_output=True, text=True, check=False
).stdout.splitlines()


def test_every_source_is_seen_by_a_folder_and_every_pattern_matches_a_file() -> None:
    sources = [file for file in FILES if file.startswith(("grpox/", "plugins/"))]
    assert sources, "git ls-files names none"
    assert [file for file in sources if not tiers.folders_for(file)] == []
    patterns = [pattern for row in tiers.SOURCES for pattern in row.split()]
    assert [p for p in patterns if not any(tiers.fnmatchcase(file, p) for file in FILES)] == []


def test_every_folder_with_tests_is_in_one_tier_and_named_folders_exist() -> None:
    folders = {*tiers.QUICK, *tiers.REST}
    assert len(folders) == len(tiers.QUICK) + len(tiers.REST)
    tests = [file for file in FILES if file.startswith("tests/") and Path(file).match("test_*.py")]
    assert [file for file in tests if not any(file.startswith(f"tests/{each}/") for each in folders)] == []
    assert [each for each in folders if not any(file.startswith(f"tests/{each}/") for file in tests)] == []
    assert {folder for row in tiers.SOURCES.values() for folder in row} <= folders
    # pytest imports files by their bare names: it refuses the second of two alike
    names = [Path(file).name for file in tests]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("path", "folders"),
    [
        ("plugins/builtin/grpox_losses/losses.py", []),
        ("plugins/builtin/grpox_mlflow/tracker.py", ["services/hosts", "services/mlflow"]),
        ("tests/services/vllm/test_vllm_server.py", ["services/vllm"]),
        ("tests/golden/services/vllm/test_vllm_server/test_told.txt", ["services/vllm"]),
        ("tests/support/processes.py", list(tiers.REST)),
        ("tests/fuzz/conftest.py", list(tiers.REST)),
    ],
)
def test_a_file_is_seen_by_its_folders(path: str, folders: list[str]) -> None:
    assert [folder for folder in tiers.REST if folder in tiers.folders_for(path)] == folders


def test_without_a_known_full_pass_everything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPOX_TEST_FULL", raising=False)
    monkeypatch.setattr(tiers, "PASSED", tmp_path / "full-passed")
    assert tiers.folders_for_change() == list(tiers.REST)
    tiers.PASSED.write_text("0123456789012345678901234567890123456789\n")
    assert tiers.folders_for_change() == list(tiers.REST)


def test_every_golden_file_belongs_to_a_test_that_takes_the_fixture() -> None:
    left = []
    for path in (each for each in golden.FOLDER.rglob("*") if each.is_file()):
        file = golden.TESTS / path.parent.relative_to(golden.FOLDER).with_suffix(".py")
        name = re.split(r"[.-]", path.name.removesuffix(".txt"))[0]
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if not re.search(rf"^def {name}\([^)]*\bgolden\b", text, re.MULTILINE):
            left.append(str(path))
    assert left == [], "no test reads these any more: remove them"
