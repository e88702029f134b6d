"""requirements/gpu_wheels.py: which wheels a GPU machine without a network lacks."""

from __future__ import annotations

import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "requirements"))

import gpu_wheels  # noqa: E402
from gpu_wheels import Collected, expected, needs_of, present, unmet  # noqa: E402


def wheel(folder: Path, name: str, version: str, needs: Sequence[str] = ()) -> Path:
    """Write a wheel that holds nothing but its metadata."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\n")
    return path


def test_a_wheel_brings_what_it_needs_and_the_machine_lacks(tmp_path: Path) -> None:
    needs = ["torch>=2", "Typing.Extensions>=4", "mlflow>=3", "hjson", "pytest; extra == 'dev'"]
    needs += ["tomli; python_version < '3.11'", "pywin32; sys_platform == 'win32'"]
    collected = Collected(tmp_path)
    found = collected.add(wheel(tmp_path, "grpox", "1.0", needs))
    assert [need.name for need in found] == ["Typing.Extensions", "hjson"]
    assert collected.add(wheel(tmp_path, "typing_extensions", "4.16", ["hjson"])) != []
    assert not collected.lacks("typing-extensions")
    assert expected(collected) == ["torch>=2"]


def test_versions_that_do_not_fit_each_other_are_told(tmp_path: Path) -> None:
    collected = Collected(tmp_path)
    collected.add(wheel(tmp_path, "pydantic", "2.14", ["pydantic-core==2.50.5"]))
    collected.add(wheel(tmp_path, "pydantic_core", "2.50.4"))
    assert unmet(collected) == [
        "pydantic needs pydantic-core==2.50.5, and pydantic_core-2.50.4-py3-none-any.whl is here"
    ]


def test_each_requirement_of_grpox_is_there_or_comes_or_is_left_out() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    there = present()
    names = {need.name for need in needs_of(project["dependencies"])}
    assert {
        "torch",
        "transformers",
        "safetensors",
        "pyyaml",
        "psutil",
        "aiohttp",
    } <= names & there
    assert names - there - gpu_wheels.LEFT_OUT.keys() >= {"deepspeed", "datasets", "pydantic", "filelock"}
