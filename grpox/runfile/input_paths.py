"""The inputs of a run on disk: what relative paths mean, and whether models and files are there.

Components may have inputs too: which of their parameters are paths is told by the types in their configs, see
`grpox.contracts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from grpox.config import DataConfig, RunConfig
from grpox.contracts import Input
from grpox.data.json_rows import UnreadableData
from grpox.data.open_data import DATA_FILES, is_data_file
from grpox.data.unusable_columns import CURE, unusable_columns
from grpox.errors import Problem, nearest, text_of
from grpox.plugins.component import BoundComponent
from grpox.runfile.checks import CheckContext
from grpox.runfile.data_files import look_at
from grpox.runfile.given import GIVEN
from grpox.runfile.model_options import media_problem_of
from grpox.runfile.output_paths import output_problems, unreachable
from grpox.runfile.slots import selected


def resolve_paths(config: RunConfig, base_of: Callable[[str], Path]) -> None:
    """Make the input paths of `config` absolute, in place; hub ids stay as they are.

    Args:
        base_of: dotted key -> the folder against which a relative path given there resolves.
    """
    config.model.path = input_path(config.model.path, base_of("model.path"))
    if config.data.path is not None:
        config.data.path = input_path(config.data.path, base_of("data.path"), DATA_FILES)
    if config.evaluation is not None and config.evaluation.path != GIVEN:
        config.evaluation.path = _absolute(config.evaluation.path, base_of("evaluation.path"))
    for key, kind, reference in selected(config):
        if reference.path is not None:
            path = _absolute_object(reference.path, base_of(f"{key}.path"))
            if kind == "observer":
                config.tracking[key.removeprefix("tracking.")]["path"] = path
            else:
                reference.path = path


def input_path(path: str, base: Path, suffixes: Collection[str] = ()) -> str:
    """An absolute path, or the hub id that `path` is; what ends in one of `suffixes` is a path."""
    if path == GIVEN or (Path(path).suffix not in suffixes and _is_hub_id(path, base)):
        return path
    return _absolute(path, base)


def _absolute_object(path: str, base: Path) -> str:
    """``path.py:name`` with an absolute path; what is not of that form is left for loading to refuse."""
    file, colon, name = path.rpartition(":")
    return f"{_absolute(file, base)}:{name}" if colon else path


def _absolute(path: str, base: Path) -> str:
    try:
        return str((base / Path(path).expanduser()).resolve())
    except (RuntimeError, OSError, ValueError):  # a loop of links, an unknown ~user: told when it is looked at
        return str(base / path)


def _is_hub_id(path: str, base: Path) -> bool:
    """Whether this is ``org/name`` on the hub rather than a path: nothing is there, nor even its parent."""
    looks_so = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None
    if not looks_so or unreachable(base / path):
        return False
    return not (base / path).exists() and not (base / path).parent.is_dir()


def input_problems(context: CheckContext) -> Iterator[Problem]:
    """Find faults of the model folder, data files and output folder of a run; counts its prompts."""
    config, given, data = context.config, context.given.inputs, context.config.data
    if context.trains:
        yield from output_problems(config)
    if "model.path" not in given:
        yield from model_problems("model.path", config.model.path)
        if context.trains and (problem := media_problem_of(Path(config.model.path), "model.path")):
            yield problem
    if context.trains and data.path is not None and "data.path" not in given:
        if is_data_file(data.path):
            problems, records = _data_problems("data.path", data.path, data.prompt_column)
            of_split, context.num_prompts = _split_of_file(data, records)
            yield from (*problems, *of_split)
        elif data.path == GIVEN:
            yield _not_given("data.path")
    if config.evaluation is not None and "evaluation.path" not in given:
        yield from _data_problems("evaluation.path", config.evaluation.path, data.prompt_column)[0]


def _not_given(key: str) -> Problem:
    what = "was an object given in Python, which no file can name"
    return Problem(what, key=key, given=GIVEN, allowed="a path, or the same object again")


def _split_of_file(data: DataConfig, records: int | None) -> tuple[list[Problem], int | None]:
    """What is wrong with `subset` and `split` of a file, and how many of its `records` the split takes."""
    problems = []
    if data.subset is not None:
        what = "a file has no subsets; those of a hub dataset have names"
        problems.append(Problem(what, key="data.subset", given=data.subset, allowed="null"))
    if data.split == "train":
        return problems, records
    # Imported here because it takes a second.
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(data.split).to_absolute({"train": records or 0})
        taken = sum(max(0, part.to - part.from_) for part in parts)
    except (ValueError, AssertionError) as error:
        allowed = "train, or a part of it such as train[:100] or train[10%:]"
        what = f"is no split of a file: {text_of(error)}"
        return [*problems, Problem(what, key="data.split", given=data.split, allowed=allowed)], None
    return problems, None if records is None else taken


def model_problems(key: str, given: str) -> Iterator[Problem]:
    """What is wrong with the model folder under `key`, its path absolute; a hub id is not looked up."""
    folder = Path(given)
    if given == GIVEN:
        yield _not_given(key)
    if not folder.is_absolute():
        return
    if reason := unreachable(folder):
        yield Problem(f"cannot be opened: {reason}", key=key, given=given)
    elif not folder.is_dir():
        what = "is a file; a model is a folder" if folder.exists() else "no such folder"
        yield Problem(what, key=key, given=given, nearest=sibling(folder, Path.is_dir))
    elif not (folder / "config.json").is_file():
        what = "no config.json in this folder"
        yield Problem(what, key=key, given=given, allowed="a model in Hugging Face format")


def _data_problems(key: str, given: str, prompt_column: str) -> tuple[list[Problem], int | None]:
    path = Path(given)
    if given == GIVEN:
        return [_not_given(key)], None
    if reason := unreachable(path):
        return [Problem(f"cannot be opened: {reason}", key=key, given=given)], None
    if not path.is_file():
        if path.is_dir():
            what = "is a folder; data is a file"
        else:
            what = "is no regular file" if path.exists() else "no such file"
        return [Problem(what, key=key, given=given, nearest=sibling(path, _is_readable))], None
    if path.suffix not in DATA_FILES:
        return [
            Problem("not a kind of file that can be read", key, given=given, allowed=", ".join(DATA_FILES))
        ], None
    try:
        file = look_at(path, prompt_column)
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
    problems = unusable_columns(file.columns, prompt_column, path.name, key)
    if file.without_prompt:
        what = f"{file.without_prompt} of {path.name} holds no prompt"
        problems.append(Problem(what, key="data.prompt_column", given=prompt_column))
    if file.media:
        what = f"{file.media}, and nothing but text is read"
        problems.append(Problem(what, key, given=given, allowed=CURE))
    return problems, file.records


def _is_readable(path: Path) -> bool:
    return path.is_file() and path.suffix in DATA_FILES


def sibling(path: Path, fits: Callable[[Path], bool]) -> str:
    """The nearest name of what `fits` beside a path that does not."""
    if not path.parent.is_dir():
        return ""
    name = nearest(path.name, sorted(other.name for other in path.parent.iterdir() if fits(other)))
    return str(path.parent / name) if name else ""


def resolve_parameters(
    config: RunConfig, components: dict[str, BoundComponent], base_of: Callable[[str], Path]
) -> list[Problem]:
    """Make the input paths among components' parameters absolute, in `config` and in `components`, in place.

    Args:
        components: by key; those that could not be bound are missing.
        base_of: dotted key -> the folder against which a relative path given there resolves.

    Returns:
        a problem for each path under which the input is not.
    """
    problems: list[Problem] = []
    for key, kind, reference in selected(config):
        bound = components.get(key)
        if bound is None or bound.config is None:
            continue
        params = config.tracking[key.removeprefix("tracking.")] if kind == "observer" else reference.model_extra
        for name, field, what in _input_fields(type(bound.config)):
            given = getattr(bound.config, field)
            if given is None or not params or name not in params:  # a default is the component's own affair
                continue
            place = f"{key}.{name}"
            path = _absolute_input(given, base_of(place), what)
            params[name] = path
            bound = replace(bound, config=bound.config.model_copy(update={field: path}))
            problems += _problems(place, path, what)
        components[key] = bound
    return problems


def _absolute_input(path: str, base: Path, what: Input) -> str:
    return input_path(path, base) if what is Input.MODEL else str((base / Path(path).expanduser()).resolve())


def _problems(key: str, given: str, what: Input) -> Iterator[Problem]:
    if what is Input.MODEL:
        yield from model_problems(key, given)
    elif not Path(given).exists():
        near = sibling(Path(given), Path.exists)
        yield Problem("no such file or folder", key=key, given=given, nearest=near)


def _input_fields(model: type[BaseModel]) -> Iterator[tuple[str, str, Input]]:
    """(key in the run file, name of the field, what it is the path of), of each field that is such a path."""
    for name, field in model.model_fields.items():
        marks = [*field.metadata, *_marks(field.annotation)]
        what = next((mark for mark in marks if isinstance(mark, Input)), None)
        if what is not None:
            yield field.alias or name, name, what


def _marks(annotation: Any) -> Iterator[Any]:
    """Return what `Annotated` says of a type or of a member of a union."""
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for member in get_args(annotation):
        yield from _marks(member)
