"""The bundled recipes, which `grpox train` knows by name: run files, each with a folder of its inputs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from grpox.errors import ConfigError, Problem, nearest


def recipe_names() -> list[str]:
    """Names of the bundled recipes."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def recipe_summary(name: str) -> str:
    """The comment that opens the recipe's run file, up to the end of its first sentence."""
    lines = recipe_path(name).read_text(encoding="utf-8").splitlines()
    comment: list[str] = []
    for line in lines:
        if not line.startswith("# "):
            break
        comment.append(line[2:].strip())
    sentence, stop, _ = " ".join(comment).partition(". ")
    return sentence + stop.strip()


def recipe_path(run: str | Path) -> Path:
    """The file that `run` means: a path of a run file, or the name of a recipe.

    Raises:
        ConfigError: it is neither, or cannot be looked at.
    """
    path, names = Path(run), recipe_names()
    try:
        found = path.is_file()
    except OSError as error:
        raise ConfigError(Problem(f"cannot be read: {error.strerror}", given=str(run))) from error
    if found:
        return path
    if str(run) in names:
        return _folder() / f"{run}.yaml"
    what = "is a folder, not a run file" if path.is_dir() else "no such run file or recipe"
    near = nearest(str(run), [*names, *(str(file) for file in _run_files(path))])
    allowed = f"a YAML file, or a recipe: {', '.join(names)}" if names else "a YAML file"
    raise ConfigError(Problem(what, given=str(run), allowed=allowed, nearest=near))


def copy_recipe(name: str, destination: Path, force: bool = False) -> list[Path]:
    """Copy a recipe's run file, and the folder of its inputs beside it, into the folder `destination`.

    Returns:
        The copies.

    Raises:
        ConfigError: there is no such recipe, a copy would overwrite something and `force` is false, or
            nothing can be written there.
    """
    names = recipe_names()
    if name not in names:
        near = nearest(name, names)
        raise ConfigError(Problem("no such recipe", given=name, allowed=", ".join(names), nearest=near))
    sources = [path for path in (_folder() / f"{name}.yaml", _folder() / name) if path.exists()]
    copies = [destination / source.name for source in sources]
    try:
        _refuse_overwriting([] if force else copies)
        destination.mkdir(parents=True, exist_ok=True)
        for source, copy in zip(sources, copies, strict=True):
            _copy(source, copy)
    except OSError as error:
        there = isinstance(error, FileExistsError | NotADirectoryError)
        what = "is not a folder" if there else f"cannot be written: {error.strerror or error}"
        place = str(error.filename2 or error.filename or destination)
        raise ConfigError(Problem(what, given=place)) from error
    return copies


def _copy(source: Path, copy: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "__init__.py")
        shutil.copytree(source, copy, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, copy)


def _refuse_overwriting(copies: Sequence[Path]) -> None:
    problems = [
        Problem("exists already", given=str(copy), allowed="another destination, or --force to overwrite it")
        for copy in copies
        if copy.exists()
    ]
    if problems:
        raise ConfigError(problems)


def _run_files(path: Path) -> list[Path]:
    folder = path.parent
    return [*folder.glob("*.yaml"), *folder.glob("*.yml")] if folder.is_dir() else []


def _folder() -> Path:
    return Path(str(resources.files("grpox.recipes")))
