"""Runs the command line as a user types it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

GrpoxCommand = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the module's runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def grpox(folder: Path) -> GrpoxCommand:
    """`grpox(*arguments, ranks=1)` in `folder`; with several ranks, under torchrun."""

    def run(*arguments: str, ranks: int = 1) -> "subprocess.CompletedProcess[str]":
        if ranks == 1:
            command = [str(Path(sys.executable).with_name("grpox"))]
        else:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [sys.executable, *launcher, "-m", "grpox"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        return subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run
