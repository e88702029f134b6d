"""30 plugins more, of which one is broken and one imports torch: those who select neither are not affected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fixtures import GrpoxCommand

MAKE = Path(__file__).parents[2] / "benchmarks" / "plugins_list.py"


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The 30 distributions, on PYTHONPATH."""
    made = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, str(MAKE), "--make", str(made)], check=True)
    path = os.pathsep.join(filter(None, [str(made), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.mark.parametrize(("name", "heavy"), [("many-heavy", True), ("many-7", False)])
def test_one_that_imports_torch_when_it_is_listed_fails_its_check(
    grpox: GrpoxCommand, name: str, heavy: bool
) -> None:
    done = grpox("plugins", "check", name)
    told = " ".join(done.stdout.split())
    assert (
        "every command imports grpox_many_heavy.plugin, and grpox_many_heavy.plugin imports torch" in told
    ) == heavy
    assert ("FAILED the plugin is listed without importing anything heavy" in told) == heavy
    assert done.returncode == heavy
