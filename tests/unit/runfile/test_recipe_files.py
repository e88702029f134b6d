"""Copying recipes: with their inputs, without losing files, and with clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.problems import refused

from grpox.errors import Problem
from grpox.runfile.load import load_run
from grpox.runfile.recipe_files import copy_recipe, recipe_names, recipe_path


def test_a_copy_that_cannot_be_made_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("file", "a/quickstart"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "b" / "quickstart.yaml").mkdir(parents=True)
    for destination, given, what in (
        ("file", "file", "is not a folder"),
        ("file/below", "file/below", "is not a folder"),
        ("a", "a/quickstart", "is not a folder"),  # also with force
        ("b", "b/quickstart.yaml", "cannot be written: Is a directory"),
    ):
        force = destination in ("a", "b")
        [problem] = refused(copy_recipe, "quickstart", tmp_path / destination, force)
        assert problem == Problem(what, given=str(tmp_path / given))
    assert (tmp_path / "file").read_text() == "mine"

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "quickstart.yaml"))

    long = "a" * 300
    [problem] = refused(copy_recipe, "quickstart", tmp_path / long)
    assert problem.what == "cannot be written: File name too long"
    [problem] = refused(recipe_path, long)
    assert problem.what == "cannot be read: File name too long"
    monkeypatch.setattr("grpox.runfile.recipe_files.shutil.copyfile", refuse)
    [problem] = refused(copy_recipe, "quickstart", tmp_path)
    assert problem.what == "cannot be written: Permission denied"


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
    [problem] = refused(copy_recipe, "quickstart-vllm", tmp_path)
    assert problem.given == str(tmp_path / "quickstart")
    assert data.read_text() == "mine"
    assert not (tmp_path / "quickstart-vllm.yaml").exists()
