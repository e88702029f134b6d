"""Copying a recipe to where nothing can be written is told as a mistake, not raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpox.errors import ConfigError, Problem
from grpox.runfile.recipe_files import copy_recipe, recipe_path


def refused(destination: Path, force: bool = False) -> Problem:
    with pytest.raises(ConfigError) as caught:
        copy_recipe("quickstart", destination, force)
    [problem] = caught.value.problems
    return problem


def test_a_destination_that_is_a_file_or_lies_below_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert refused(file) == Problem("is not a folder", given=str(file))
    assert refused(file / "below") == Problem("is not a folder", given=str(file / "below"))
    assert file.read_text() == "mine"


def test_a_file_in_the_place_of_the_folder_of_inputs_even_with_force(tmp_path: Path) -> None:
    (tmp_path / "quickstart").write_text("mine")
    assert refused(tmp_path, force=True) == Problem("is not a folder", given=str(tmp_path / "quickstart"))


def test_a_folder_in_the_place_of_the_run_file_even_with_force(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").mkdir()
    problem = refused(tmp_path, force=True)
    assert (problem.what, problem.given) == (
        "cannot be written: Is a directory",
        str(tmp_path / "quickstart.yaml"),
    )


def test_the_reason_of_the_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "quickstart.yaml"))

    monkeypatch.setattr("grpox.runfile.recipe_files.shutil.copyfile", refuse)
    assert refused(tmp_path).what == "cannot be written: Permission denied"


def test_a_name_longer_than_file_names_can_be(tmp_path: Path) -> None:
    assert refused(tmp_path / ("a" * 300)).what == "cannot be written: File name too long"
    with pytest.raises(ConfigError) as caught:
        recipe_path("a" * 300)
    assert caught.value.problems[0].what == "cannot be read: File name too long"
