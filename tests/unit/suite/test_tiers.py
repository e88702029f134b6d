"""A change asks for the folders of tests that see it, and no source is forgotten."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support import tiers

FILES = subprocess.run(
    ["git", "ls-files"], cwd=tiers.ROOT, capture_output=True, text=True, check=False
).stdout.splitlines()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two commits, whose first has passed everything."""
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    monkeypatch.setattr(tiers, "PASSED", tmp_path / ".ci" / "full-passed")
    monkeypatch.delenv("GRPOX_TEST_FULL", raising=False)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "user.name", "Ada")
    git(tmp_path, "config", "user.email", "ada@example.org")
    (tmp_path / ".ci").mkdir()
    change(tmp_path, "README.md")
    assert "now names" in tiers.note_full_pass()
    change(tmp_path, ".ci/full-passed", tiers.PASSED.read_text())
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def change(folder: Path, name: str, text: str = "new\n", commit: bool = True) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    if commit:
        git(folder, "add", name)
        git(folder, "commit", "-q", "-m", name)


def test_every_source_is_seen_by_a_folder() -> None:
    sources = [file for file in FILES if file.startswith(("grpox/", "plugins/"))]
    assert sources, "git ls-files names none"
    assert [file for file in sources if not tiers.folders_for(file)] == []


def test_every_pattern_matches_a_file() -> None:
    patterns = [pattern for row in tiers.SOURCES for pattern in row.split()]
    assert [p for p in patterns if not any(tiers.fnmatchcase(file, p) for file in FILES)] == []


def test_every_folder_with_tests_is_in_one_tier_and_named_folders_exist() -> None:
    folders = {*tiers.QUICK, *tiers.REST}
    assert len(folders) == len(tiers.QUICK) + len(tiers.REST)
    tests = [file for file in FILES if file.startswith("tests/") and Path(file).match("test_*.py")]
    outside = [file for file in tests if not any(file.startswith(f"tests/{folder}/") for folder in folders)]
    assert [file for file in outside if "third_party" not in file] == []
    for folder in folders:
        assert any(file.startswith(f"tests/{folder}/") for file in tests), folder
    assert {folder for row in tiers.SOURCES.values() for folder in row} <= folders


@pytest.mark.parametrize(
    ("path", "folders"),
    [
        ("plugins/builtin/grpox_losses/losses.py", []),
        ("docs/own-loss.md", ["cold"]),
        ("plugins/builtin/grpox_mlflow/tracker.py", ["services/hosts", "services/mlflow"]),
        ("tests/services/vllm/test_vllm_server.py", ["services/vllm"]),
        ("tests/golden/services/vllm/test_vllm_server/test_told.txt", ["services/vllm"]),
        ("tests/golden/unit/cli/test_doctor/test_told.txt", []),
        ("tests/support/processes.py", list(tiers.REST)),
        ("pyproject.toml", list(tiers.REST)),
        ("tests/fuzz/conftest.py", list(tiers.REST)),
    ],
)
def test_a_changed_file_asks_for_its_folders(repository: Path, path: str, folders: list[str]) -> None:
    change(repository, path)
    assert tiers.folders_for_change() == folders


def test_all_commits_since_the_pass_count_and_so_does_what_is_not_committed(repository: Path) -> None:
    change(repository, "plugins/builtin/grpox_mlflow/tracker.py")
    change(repository, "docs/own-loss.md")
    change(repository, "plugins/builtin/grpox_vllm_serving/protocol.py", commit=False)
    assert tiers.folders_for_change() == ["cold", "services/hosts", "services/mlflow", "services/vllm"]


def test_a_removed_file_counts_and_so_does_the_old_name_of_a_moved_one(repository: Path) -> None:
    change(repository, "plugins/builtin/grpox_mlflow/tracker.py")
    tiers.note_full_pass()
    git(repository, "mv", "plugins/builtin/grpox_mlflow/tracker.py", "elsewhere.py")
    git(repository, "commit", "-q", "-m", "moved")
    assert tiers.folders_for_change() == ["services/hosts", "services/mlflow"]


def test_without_a_known_pass_everything_runs(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers.PASSED.write_text("0123456789012345678901234567890123456789\n")
    assert tiers.folders_for_change() == list(tiers.REST)
    tiers.PASSED.unlink()
    assert tiers.folders_for_change() == list(tiers.REST)


def test_a_tree_with_changes_has_not_passed(repository: Path) -> None:
    before = tiers.PASSED.read_text()
    change(repository, "README.md", "newer\n", commit=False)
    assert "not committed" in tiers.note_full_pass()
    assert tiers.PASSED.read_text() == before


def test_no_two_test_files_have_one_name() -> None:
    # pytest imports them by their bare names: of two alike it refuses the second when all folders run together
    names = [path.name for path in (tiers.ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
