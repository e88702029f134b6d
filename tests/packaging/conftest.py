"""One fresh environment for all tests of this folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from support.patience import patient
from support.session import session_folder

ROOT = Path(__file__).parents[2]
THIRD_PARTY = ROOT / "tests" / "packaging" / "third_party"
EXAMPLES = sorted(path.parent for path in (ROOT / "plugins" / "examples").glob("*/pyproject.toml"))
LEFTOVERS = ("build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache", ".venv", ".git")
OF_GRPOX = ("pyproject.toml", "README.md", "LICENSE", "grpox", "plugins/builtin")
"""Files that go into the wheel of grpox."""
KEPT = 50
"""Wheels in the cache, the newest ones."""


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


def copied(source: Path, folder: Path) -> Path:
    """Copy a distribution's sources: building leaves files behind, and may take in old ones."""
    return Path(shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns(*LEFTOVERS)))


def wheel_of(source: Path, parts: Sequence[str] = (".",), isolated: bool = False) -> Path:
    """Build the wheel of a distribution, or take the one that was built of the same files before.

    Wheels lie in the user's cache, in a folder for each state of the sources. With ``GRPOX_TESTS_UNCACHED=1``
    each session builds its own.

    Args:
        source: the distribution's folder.
        parts: files and folders in it that go into the wheel.
        isolated: built in an environment of its own with what pyproject.toml requires, which takes ten seconds.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpox" / "test-wheels"
    if os.environ.get("GRPOX_TESTS_UNCACHED") == "1":
        cache = session_folder() / "wheels"
    kept = cache / state_of(source, parts)
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=cache) as made:
            build = [sys.executable, "-m", "build", "--wheel", "--outdir", f"{made}/wheel"]
            ways = [] if isolated else ["--no-isolation"]  # with the setuptools that is here
            sources = copied(source, Path(folder))
            kept = cache / state_of(sources, parts)  # they may have changed meanwhile
            succeed([*build, *ways, sources], Path(folder))
            with suppress(OSError):  # another process has built it meanwhile
                Path(made, "wheel").rename(kept)
        for old in sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    [wheel] = kept.glob("*.whl")
    return wheel


def state_of(source: Path, parts: Sequence[str]) -> str:
    """Return a name for the contents of these files, and for the Python that packs them."""
    state = hashlib.sha256(f"{source.name} {sys.version}".encode())
    for path in sorted(files_of(source, parts)):
        content = path.read_bytes()
        state.update(f"\n{path.relative_to(source)} {len(content)} {os.access(path, os.X_OK)}\n".encode())
        state.update(content)
    return state.hexdigest()[:32]


def files_of(source: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files of a distribution, without what building and running it has left."""
    ignored = shutil.ignore_patterns(*LEFTOVERS)
    for part in parts:
        if (source / part).is_file():
            yield source / part
        for folder, below, names in os.walk(source / part):
            below[:] = set(below) - ignored(folder, below)
            yield from (Path(folder, name) for name in set(names) - ignored(folder, names))


@pytest.fixture(scope="session")
def wheels() -> list[Path]:
    """grpox, every example and the third party, as pip builds them from their sources."""
    return [wheel_of(ROOT, OF_GRPOX, isolated=True), *map(wheel_of, (*EXAMPLES, THIRD_PARTY))]


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
