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

ROOT = Path(__file__).parents[2]
THIRD_PARTY = ROOT / "tests" / "packaging" / "third_party"
EXAMPLES = sorted(path.parent for path in (ROOT / "plugins" / "examples").glob("*/pyproject.toml"))
LEFTOVERS = ("build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache", ".venv")


def succeed(command: Sequence[str | Path], cwd: Path, **variables: str) -> str:
    """What `command` prints. Nothing of this process's own Python reaches it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | variables,
        capture_output=True,
        text=True,
        timeout=1800,
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
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The plugins' distributions, copied: building leaves files behind, and may take in old ones."""
    folder = tmp_path_factory.mktemp("sources")
    return [
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns(*LEFTOVERS))
        for source in (*EXAMPLES, THIRD_PARTY)
    ]


@pytest.fixture(scope="session")
def wheels(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """grpox, every example and the third party, as pip builds them from their sources."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder]
    succeed([*build, ROOT], folder)
    for source in sources:
        # With the setuptools that is here: an environment for each would take ten seconds.
        succeed([*build, "--no-isolation", source], folder)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def environment(
    wheels: list[Path], sources: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """The wheels are installed by pip, with what they require and these tests' own environment has not.

    torch and its like are the environment's own: to install them once more takes minutes, and `make` does it.
    """
    folder = tmp_path_factory.mktemp("environment")
    succeed([sys.executable, "-m", "venv", folder], folder)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    Path(paths["purelib"], "libraries.pth").write_text(sysconfig.get_paths()["purelib"])
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    # Else pip would be content with the grpox from which these tests run.
    succeed([*pip, "--no-deps", "--ignore-installed", *wheels], folder)
    succeed([*pip, *wheels], folder)
    return Environment(folder, sources[0].parent)
