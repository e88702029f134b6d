"""Fixtures shared by the unit tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpox.plugins.discovery import DISABLE_VARIABLE

MakeDistribution = Callable[..., Path]


@pytest.fixture
def make_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDistribution]:
    """Installs real distributions for one test: a folder on `sys.path` with a module and its dist-info.

    ``make_distribution("grpox-foo", source)`` puts `source` into module ``grpox_foo`` and points the entry
    point ``plugin`` at it; `entry_points`, a mapping of name to value, replaces that.
    """
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)

    def make(
        name: str,
        source: str,
        version: str = "1.0",
        entry_points: dict[str, str] | None = None,
    ) -> Path:
        folder = tmp_path / name
        module = name.replace("-", "_")
        metadata = folder / f"{module}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{key} = {value}" for key, value in (entry_points or {"plugin": module}).items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[grpox]", *lines, ""]))
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield make
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
