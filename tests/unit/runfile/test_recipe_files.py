"""Copying recipes: with their inputs, without losing files, and with clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpox.errors import ConfigError, Problem
from grpox.runfile.load import load_run
from grpox.runfile.recipe_files import copy_recipe, recipe_names, recipe_path


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


def test_the_message_has_the_systems_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "quickstart.yaml"))

    monkeypatch.setattr("grpox.runfile.recipe_files.shutil.copyfile", refuse)
    assert refused(tmp_path).what == "cannot be written: Permission denied"


def test_a_name_longer_than_file_names_can_be(tmp_path: Path) -> None:
    assert refused(tmp_path / ("a" * 300)).what == "cannot be written: File name too long"
    with pytest.raises(ConfigError) as caught:
        recipe_path("a" * 300)
    assert caught.value.problems[0].what == "cannot be read: File name too long"


@pytest.mark.parametrize("name", ["quickstart", "smollm2"])
def test_a_recipe_with_vllm_differs_from_its_original_in_the_generator_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours, original = (load_run(run, ["generator=hf"]).config for run in (f"{name}-vllm", name))
    assert ours.output_dir == f"runs/{name}-vllm"
    assert ours.model_copy(update={"output_dir": original.output_dir}) == original


@pytest.mark.parametrize("name", recipe_names())
def test_a_copy_holds_every_input_that_its_run_file_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, *folders = copy_recipe(name, tmp_path)
    config = load_run(run, ["generator=hf"]).config
    inputs = [path for path in (config.model.path, config.data.path) if Path(str(path)).is_absolute()]
    assert inputs
    assert all(Path(str(path)).is_relative_to(tmp_path) and Path(str(path)).exists() for path in inputs)
    assert not list(tmp_path.rglob("__init__.py"))
    assert [folder.name for folder in folders] == [name.removesuffix("-vllm")]


def test_a_folder_that_two_recipes_share_is_only_in_the_way_once_it_was_changed(tmp_path: Path) -> None:
    copy_recipe("quickstart", tmp_path)
    copy_recipe("quickstart-vllm", tmp_path)
    (tmp_path / "quickstart-vllm.yaml").unlink()
    data = tmp_path / "quickstart" / "train.jsonl"
    data.write_text("mine")
    with pytest.raises(ConfigError) as caught:
        copy_recipe("quickstart-vllm", tmp_path)
    assert [problem.given for problem in caught.value.problems] == [str(tmp_path / "quickstart")]
    assert data.read_text() == "mine"
    assert not (tmp_path / "quickstart-vllm.yaml").exists()
