"""One fresh environment for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.patience import patient

ROOT = Path(__file__).parents[2]
THIRD_PARTY = ROOT / "tests" / "packaging" / "third_party"
EXAMPLES = sorted(path.parent for path in (ROOT / "plugins" / "examples").glob("*/pyproject.toml"))
LEFTOVERS = ("build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache", ".venv", ".git")


def succeed(command: Sequence[str | Path], cwd: Path, **variables: str) -> str:
    """Return the output of `command`, which inherits nothing of this process's own Python."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | variables,
        capture_output=True,
        text=True,
        timeout=patient(600),
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


class Environment:
    """A fresh environment with everything installed from wheels, and folders to work in."""

    def __init__(self, folder: Path, examples: Path) -> None:
        self.bin = folder / "bin"
        self.examples = examples
        """Copies of the example distributions' sources, for their tests."""

    def python(self, *arguments: str, cwd: Path, **variables: str) -> str:
        return succeed([self.bin / "python", *arguments], cwd, **variables)

    def grpox(self, *arguments: str, cwd: Path, **variables: str) -> str:
        return succeed([self.bin / "grpox", *arguments], cwd, **variables)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """grpox, every example and the third party, as pip builds them from copies of their sources.

    grpox alone is built in an environment of its own, with what pyproject.toml requires.
    """
    folder = tmp_path_factory.mktemp("wheels")
    own, *others = (copied(source, folder) for source in (ROOT, *EXAMPLES, THIRD_PARTY))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "built"]
    succeed([*pip, own], folder)
    succeed([*pip, "--no-build-isolation", *others], folder)
    return sorted((folder / "built").iterdir())


def copied(source: Path, folder: Path) -> Path:
    """Copy a distribution's sources: building leaves files behind, and may take in old ones."""
    return Path(shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns(*LEFTOVERS)))


@pytest.fixture(scope="session")
def environment(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheels are installed by pip, with what they require and these tests' own environment has not.

    torch and its like are the environment's own: to install them once more takes minutes, and `make` does it.
    """
    folder = tmp_path_factory.mktemp("environment")
    succeed([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    Path(paths["purelib"], "libraries.pth").write_text(sysconfig.get_paths()["purelib"])
    # The pip of these tests' own environment installs there: to give it one of its own takes seconds.
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    # Else pip would be content with the grpox from which these tests run.
    succeed([*pip, "--no-deps", "--ignore-installed", *wheels], folder)
    succeed([*pip, *wheels], folder)
    examples = tmp_path_factory.mktemp("examples")
    for example in EXAMPLES:
        copied(example, examples)
    return Environment(folder, examples)
