"""Bundled recipes, which `grpox train` runs by name: run files and the folders of their inputs."""

from __future__ import annotations

import filecmp
import shutil
from importlib import resources
from itertools import takewhile
from pathlib import Path

from grpox.errors import ConfigError, Problem, nearest
from grpox.runfile.yaml_lines import leaves, read_yaml


def recipe_names() -> list[str]:
    """List the names of the bundled recipes."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def recipe_summary(name: str) -> str:
    """Return the first sentence of the recipe's opening comment."""
    lines = recipe_path(name).read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("# "), lines)
    sentence, stop, _ = " ".join(line[2:].strip() for line in comment).partition(". ")
    return sentence + stop.strip()


def recipe_path(run: str | Path) -> Path:
    """Return the file of `run`, which is the path of a run file or the name of a recipe.

    Raises:
        ConfigError: `run` is neither a file nor a recipe, or cannot be read.
    """
    path, names = Path(run), recipe_names()
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", given=str(run)) from error
    if str(run) in names:
        return _folder() / f"{run}.yaml"
    what = "is a folder, not a run file" if path.is_dir() else "no such run file or recipe"
    files = [str(file) for file in path.parent.glob("*.y*ml") if file.suffix in (".yaml", ".yml")]
    near = nearest(str(run), [*names, *files])
    allowed = f"a YAML file, or a recipe: {', '.join(names)}" if names else "a YAML file"
    raise ConfigError(what, given=str(run), allowed=allowed, nearest=near)


def copy_recipe(name: str, destination: Path, force: bool = False) -> list[Path]:
    """Copy a recipe's run file and its folders of inputs into the folder `destination`.

    Recipes share folders, so an unchanged folder of an earlier copy is overwritten without `force`.

    Returns:
        paths of the copies.

    Raises:
        ConfigError: the recipe does not exist, a copy would overwrite a file and `force` is false, or the
            destination cannot be written.
    """
    names = recipe_names()
    if name not in names:
        raise ConfigError("no such recipe", given=name, allowed=", ".join(names), nearest=nearest(name, names))
    file = _folder() / f"{name}.yaml"
    data = read_yaml(file.read_text(encoding="utf-8"), name).data
    # The bundled folders with which paths of the run file begin.
    texts = (value for _, value in leaves(data) if isinstance(value, str) and "/" in value)
    folders = dict.fromkeys(_folder() / text.partition("/")[0] for text in texts)
    copies = {path: destination / path.name for path in (file, *folders) if path.exists()}
    try:
        losses = [copy for source, copy in copies.items() if copy.exists() and not _is_same(source, copy)]
        if losses and not force:
            allowed = "another destination, or --force to overwrite it"
            raise ConfigError([Problem("exists already", given=str(copy), allowed=allowed) for copy in losses])
        destination.mkdir(parents=True, exist_ok=True)
        for source, copy in copies.items():
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "__init__.py")
                shutil.copytree(source, copy, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copyfile(source, copy)
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        what = "is not a folder" if is_file else f"cannot be written: {error.strerror or error}"
        raise ConfigError(what, given=str(error.filename2 or error.filename or destination)) from error
    return list(copies.values())


def _is_same(source: Path, copy: Path) -> bool:
    """Return True for two folders whose common files are equal."""
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    there = [str(path) for path in files if (copy / path).exists()]
    agree = filecmp.cmpfiles(source, copy, there, shallow=False)[0] == there
    return source.is_dir() and copy.is_dir() and agree


def _folder() -> Path:
    return Path(str(resources.files("grpox.runfile.recipes")))
