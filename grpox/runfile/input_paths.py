"""The inputs of a run on disk: what relative paths mean, and whether model and data files are there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from grpox.config import RunConfig
from grpox.errors import Problem, nearest
from grpox.prompts import LOADERS
from grpox.runfile.data_files import UnreadableData, look_at
from grpox.runfile.slots import selected


def resolve_paths(config: RunConfig, base_of: Callable[[str], Path]) -> None:
    """Make the input paths of `config` absolute, in place; a model's hub id stays as it is.

    Args:
        base_of: dotted key -> the folder against which a relative path given there resolves.
    """
    base = base_of("model.path")
    if not _is_hub_id(config.model.path, base):
        config.model.path = _absolute(config.model.path, base)
    if config.data.path is not None:
        config.data.path = _absolute(config.data.path, base_of("data.path"))
    if config.evaluation is not None:
        config.evaluation.path = _absolute(config.evaluation.path, base_of("evaluation.path"))
    for key, kind, reference in selected(config):
        if reference.path is not None:
            path = _absolute_object(reference.path, base_of(f"{key}.path"))
            if kind == "observer":
                config.tracking[key.removeprefix("tracking.")]["path"] = path
            else:
                reference.path = path


def _absolute_object(path: str, base: Path) -> str:
    """``path.py:name`` with an absolute path; what is not of that form is left for loading to refuse."""
    file, colon, name = path.rpartition(":")
    return f"{_absolute(file, base)}:{name}" if colon else path


def _absolute(path: str, base: Path) -> str:
    return str((base / Path(path).expanduser()).resolve())


def _is_hub_id(path: str, base: Path) -> bool:
    """Whether this is ``org/name`` on the hub rather than a folder: no such folder, nor even its parent."""
    looks_so = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None
    return looks_so and not (base / path).exists() and not (base / path).parent.is_dir()


def check_inputs(config: RunConfig) -> tuple[list[Problem], int | None]:
    """What is wrong with the model folder, data files and output folder of `config`, its paths resolved.

    Returns:
        The problems, and the number of training prompts where it is cheaply known.
    """
    problems = list(_model_problems(config.model.path))
    if Path(config.output_dir).exists() and not Path(config.output_dir).is_dir():
        problems.append(Problem("is a file, not a folder", key="output_dir", given=config.output_dir))
    records = None
    if config.data.path is not None:
        found, records = _data_problems("data.path", config.data.path, config.data.prompt_column)
        problems += found
    if config.evaluation is not None:
        problems += _data_problems("evaluation.path", config.evaluation.path, config.data.prompt_column)[0]
    return problems, records


def _model_problems(given: str) -> Iterator[Problem]:
    folder = Path(given)
    if not folder.is_absolute():
        return
    if not folder.is_dir():
        what = "is a file; a model is a folder" if folder.exists() else "no such folder"
        yield Problem(what, key="model.path", given=given, nearest=_sibling(folder))
    elif not (folder / "config.json").is_file():
        what = "no config.json in this folder"
        yield Problem(what, key="model.path", given=given, allowed="a model in Hugging Face format")


def _data_problems(key: str, given: str, prompt_column: str) -> tuple[list[Problem], int | None]:
    path = Path(given)
    if not path.is_file():
        what = "is a folder; data is a file" if path.is_dir() else "no such file"
        return [Problem(what, key=key, given=given, nearest=_sibling(path))], None
    if path.suffix not in LOADERS:
        return [
            Problem("not a kind of file that can be read", key, given=given, allowed=", ".join(LOADERS))
        ], None
    try:
        file = look_at(path)
    except UnreadableData as error:
        return [Problem(str(error), key=key, given=given)], None
    if prompt_column not in file.columns:
        problem = Problem(
            f"no such column in {path.name}",
            key="data.prompt_column",
            given=prompt_column,
            allowed=", ".join(file.columns),
            nearest=nearest(prompt_column, file.columns),
        )
        return [problem], file.records
    return [], file.records


def _sibling(path: Path) -> str:
    """The nearest name beside a path that does not exist."""
    if path.exists() or not path.parent.is_dir():
        return ""
    name = nearest(path.name, sorted(other.name for other in path.parent.iterdir()))
    return str(path.parent / name) if name else ""
