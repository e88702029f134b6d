"""The folders of tests: those of `make test`, those of `make test-full`, and those that a change asks for.

    python tests/support/tiers.py quick      # folders of `make test`
    python tests/support/tiers.py changed    # the others that the changes since the last full pass ask for
    python tests/support/tiers.py passed     # take note that everything has passed, on a clean tree

The last full pass is the commit that `.ci/full-passed` names. Only Python's own library is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSED = ROOT / ".ci" / "full-passed"
NO_SOURCES = (".ci/full-passed", "tests/support/durations.json")
"""Files that decide nothing of what is tested: the note itself, and the order in which test files begin."""
QUICK = ("unit", "builtin", "contract", "docs", "fuzz", "ranks", "runs")
"""The folders of tests/ that `make test` runs."""
REST = ("cold", "packaging", "services/hosts", "services/mlflow", "services/vllm")
"""The others."""
EVERYTHING = ("pyproject.toml", "Makefile", "tests/support/*", "tests/conftest.py", "tests/*/conftest.py")
"""A change to one of these asks for all folders: they decide how every test runs."""

SOURCES: dict[str, tuple[str, ...]] = {
    # The rooms of grpox, in the order in which they import each other.
    "grpox/errors/* grpox/config/* grpox/runfile/*": ("unit", "fuzz", "runs", "cold"),
    "grpox/runtime/*": ("unit", "ranks", "runs", *REST),
    "grpox/plugins/* grpox/runfile/lock/* grpox/runfile/checks.py": (
        "unit", "builtin", "runs", "cold", "packaging",
    ),
    "grpox/environments/*": ("unit", "contract", "runs", "services/vllm"),
    "grpox/data/*": ("unit", "fuzz", "ranks", "runs", "services/vllm"),
    "grpox/runfile/recipes/*": ("unit", "runs", "cold", "packaging", "services/vllm"),
    "grpox/policy/*": ("unit", "ranks", "runs", "services/vllm"),
    "grpox/policy/memory_plan/*": ("unit", "fuzz", "runs", "cold"),
    "grpox/policy/deepspeed_import.py": ("unit", "ranks", "runs", *REST),
    "grpox/rollout/*": ("unit", "ranks", "runs", "services/vllm"),
    "grpox/rollout/rewards/*": ("unit", "builtin", "runs", "cold"),
    "grpox/update/*": ("unit", "ranks", "runs"),
    "grpox/observing/*": ("unit", "builtin", "runs", "services/mlflow"),
    "grpox/checkpoint/*": ("unit", "ranks", "runs", "services/mlflow", "services/hosts"),
    "grpox/training/* grpox/contracts.py grpox/toolkit.py grpox/__init__.py grpox/__main__.py": (
        "unit", "ranks", "runs", *REST),
    "grpox/testing/*": ("unit", "contract", "runs", "cold", "packaging"),
    "grpox/cli/*": ("unit", "contract", "fuzz", "runs", "cold"),
    "grpox/py.typed": ("packaging",),
    # Built-in plugins.
    "plugins/builtin/grpox_losses/* plugins/builtin/grpox_advantages/* plugins/builtin/grpox_corrections/* "
    "plugins/builtin/grpox_rewards/* plugins/builtin/grpox_environments/*": ("builtin", "runs"),
    "plugins/builtin/grpox_generators/*": ("builtin", "runs", "services/vllm"),
    "plugins/builtin/grpox_vllm_serving/*": ("builtin", "cold", "services/vllm", "services/hosts"),
    "plugins/builtin/grpox_mlflow/*": ("builtin", "runs", "services/mlflow", "services/hosts"),
    "plugins/examples/* plugins/README.md LICENSE": ("packaging",),
    # Pages, whose commands and code are run; examples and benchmarks, of which tests run some.
    "README.md docs/* mkdocs.yml": ("docs", "runs", "cold"),
    "docs/vllm.md docs/many-nodes.md": ("cold", "services/vllm", "services/hosts"),
    "examples/*": ("docs",),
    "benchmarks/*": ("docs", "runs"),
    "requirements/*": ("services/vllm",),
}  # fmt: skip
"""Patterns of sources, which cross folders, and the folders of tests that see them. All rows that match
count."""


def folders_for(path: str) -> set[str]:
    """Return the folders of tests that see a file, given by its path in the repository."""
    if any(fnmatchcase(path, pattern) for pattern in EVERYTHING):
        return {*QUICK, *REST}
    test = path.replace("tests/golden/", "tests/", 1)  # a text is as the test that compares with it
    found = {folder for folder in (*QUICK, *REST) if test.startswith(f"tests/{folder}/")}
    for patterns, folders in SOURCES.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns.split()):
            found.update(folders)
    return found


def folders_for_change() -> list[str]:
    """Return the folders that must run beside those of `make test`; all where changes are not known."""
    changed = None if os.environ.get("GRPOX_TEST_FULL") == "1" else changed_paths()
    wanted = set(REST) if changed is None else set().union(*map(folders_for, changed))
    return [folder for folder in REST if folder in wanted]


def changed_paths() -> list[str] | None:
    """Return the files that differ from the last full pass; None where that is not known."""
    commit = PASSED.read_text().strip() if PASSED.exists() else ""
    if not commit or _git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    committed = _git("diff", "--name-only", "--no-renames", commit)
    untracked = _git("ls-files", "--others", "--exclude-standard")
    if committed is None or untracked is None:
        return None
    return [path for path in (*committed, *untracked) if path not in NO_SOURCES]


def note_full_pass() -> str:
    """Name the current commit in `.ci/full-passed` if the tree is clean, and return what was done."""
    name = PASSED.relative_to(ROOT).as_posix()
    status = _git("status", "--porcelain")
    head = _git("rev-parse", "HEAD")
    if head is None or status is None:
        return f"{name} is left as it is: this is no git checkout"
    if any(line[3:] not in NO_SOURCES for line in status):
        return f"{name} is left as it is: the tree has changes that are not committed"
    PASSED.write_text(f"{head[0]}\n")
    return f"{name} now names {head[0]}: commit it"


def _git(*arguments: str) -> list[str] | None:
    """Return the lines that git prints, or None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def paths_of(folders: Iterable[str]) -> str:
    return " ".join(f"tests/{folder}" for folder in folders)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["quick"]:
            print(paths_of(QUICK))
        case ["changed"]:
            print(paths_of(folders_for_change()))
        case ["passed"]:
            print(note_full_pass())
        case _:
            sys.exit(__doc__)
