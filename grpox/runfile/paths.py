"""Input paths and output folder of a run: resolves relative paths and checks that files exist.

Components may have inputs too: the types in their configs mark the parameters that are paths, see
`grpox.contracts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from grpox.config import ComponentRef, DataConfig, EvaluationSetConfig, HubConfig, RunConfig
from grpox.config.sampling import path_key
from grpox.contracts import Input
from grpox.data.json_rows import UnreadableData
from grpox.data.open_data import DATA_FILES, is_data_file
from grpox.data.unusable_columns import CURE, unusable_columns
from grpox.errors import Problem, nearest, text_of
from grpox.plugins.component import BoundComponent
from grpox.runfile.checks import CheckContext, stream_problems
from grpox.runfile.data_files import look_at, missing_columns, row_check
from grpox.runfile.objects import GIVEN
from grpox.runfile.slots import selected

ADAPTER_CONFIG = "adapter_config.json"
"""File of an adapter in peft's format."""
SET_ASIDE = ("model", "completions", "tokens")
"""Folders in output_dir whose old content a run moves to ``earlier/``."""
_NOT_GIVEN = ("was a Python object, which a file cannot name", "a path, or the same object again")
"""Message for `GIVEN` in a run file, and the allowed values."""


def resolve_paths(config: RunConfig, base_of: Callable[[str], Path]) -> None:
    """Make the input paths of `config` absolute, in place; hub ids stay as they are.

    Args:
        base_of: dotted key -> the folder against which a relative path given there resolves.
    """
    config.model.path = input_path(config.model.path, base_of("model.path"))
    if config.data.path is not None:
        config.data.path = input_path(config.data.path, base_of("data.path"), DATA_FILES)
    if config.evaluation is not None:
        if config.evaluation.path not in (None, GIVEN):
            config.evaluation.path = _absolute(config.evaluation.path, base_of(path_key("")))
        for name, each in config.evaluation.sets.items():
            each.path = input_path(each.path, base_of(path_key(name)), DATA_FILES)
    for key, kind, reference in selected(config):
        resolve_object(key, reference, base_of)
        if reference.path is not None and kind == "observer":
            config.tracking[key.removeprefix("tracking.")]["path"] = reference.path
    for place, tool in enumerate(config.tools):
        file, _, name = tool.rpartition(":")
        if file.endswith(".py"):
            config.tools[place] = f"{_absolute(file, base_of(f'tools[{place}]'))}:{name}"


def resolve_object(key: str, reference: ComponentRef, base_of: Callable[[str], Path]) -> None:
    """Make the file of a component given by ``path.py:name`` absolute, in place; other forms stay."""
    file, colon, name = (reference.path or "").rpartition(":")
    if colon:
        reference.path = f"{_absolute(file, base_of(f'{key}.path'))}:{name}"


def input_path(path: str, base: Path, suffixes: Collection[str] = ()) -> str:
    """Return the absolute path, or `path` unchanged if it is a hub id (without an ending of `suffixes`)."""
    is_like_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) and Path(path).suffix not in suffixes
    there = base / path
    # Neither the path nor its parent exists.
    if is_like_id and not unreachable(there) and not there.exists() and not there.parent.is_dir():
        return path
    return path if path == GIVEN else _absolute(path, base)


def _absolute(path: str, base: Path) -> str:
    try:
        return str((base / Path(path).expanduser()).resolve())
    except (RuntimeError, OSError, ValueError):  # a loop of links, an unknown ~user: reported by the checks
        return str(base / path)


def model_problems(key: str, given: str) -> Iterator[Problem]:
    """Find mistakes in the model folder under `key`, an absolute path; a hub id is not looked up."""
    folder, what, allowed, near = Path(given), "", "", ""
    if given == GIVEN:
        what, allowed = _NOT_GIVEN
    elif not folder.is_absolute():
        return
    elif reason := unreachable(folder):
        what = f"cannot be opened: {reason}"
    elif not folder.is_dir():
        what = "is a file, but a model is a folder" if folder.exists() else "no such folder"
        near = sibling(folder, Path.is_dir)
    elif not (folder / "config.json").is_file():
        what, allowed = "no config.json in this folder", "a model in Hugging Face format"
        if (folder / ADAPTER_CONFIG).is_file():
            what = "is a LoRA adapter, not a whole model"
            allowed = (
                "the folder of the merged model: load it with peft's AutoPeftModelForCausalLM, then "
                "merge_and_unload() and save_pretrained(FOLDER)"
            )
    if what:
        yield Problem(what, key, given=given, allowed=allowed, nearest=near)


def data_problems(context: CheckContext) -> Iterator[Problem]:
    """Find mistakes in the files of prompts; counts those of training, and notes the columns beside them."""
    config, given = context.config, context.given
    sets: dict[str, DataConfig | EvaluationSetConfig] = {}
    if context.trains and config.data.path is not None:
        sets["data.path"] = config.data
    if config.evaluation is not None:
        sets |= {path_key(name): each for name, each in config.evaluation.named_sets.items()}
    for key, each in sets.items():
        path = each.path or ""
        if key not in given.inputs and (is_data_file(path) or path == GIVEN):
            problems, records = _file_problems(key, path, context)
            section = key.removesuffix(".path")
            if each.subset is not None:
                what = "a file has no subsets; only hub datasets do"
                problems.append(Problem(what, f"{section}.subset", given=each.subset, allowed="null"))
            if each.split != "train":
                of_split, records = _split_of(each.split, records, f"{section}.split")
                problems += of_split
            yield from problems
            if key == "data.path":
                context.num_prompts = records
    if config.data.streaming or given.streamed:
        yield from stream_problems(config)
    rows = {"data.path": given.dataset} | {path_key(name): each for name, each in given.eval_datasets.items()}
    for key, table in rows.items():
        if names := getattr(table, "column_names", None):  # a stream may not know them
            context.columns[key] = tuple(name for name in names if name != config.data.prompt_column)


def _split_of(split: str, records: int | None, key: str) -> tuple[list[Problem], int | None]:
    """Check the split of a file of `records`, and count those in it."""
    from datasets import ReadInstruction  # takes a second

    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": records or 0})
        count = sum(max(0, part.to - part.from_) for part in parts)
        return [], None if records is None else count
    except (ValueError, AssertionError) as error:
        allowed = "train, or a part of it such as train[:100] or train[10%:]"
        return [Problem(f"is not a valid split of a file: {text_of(error)}", key, "", split, allowed)], None


def _file_problems(key: str, given: str, context: CheckContext) -> tuple[list[Problem], int | None]:
    """Find mistakes in a file of prompts, and count its records."""
    config, path, prompt_column = context.config, Path(given), context.config.data.prompt_column
    whens = [each.when for each in config.environments.values()]
    what = nearby = allowed = ""
    if given == GIVEN:
        what, allowed = _NOT_GIVEN
    elif reason := unreachable(path):
        what = f"cannot be opened: {reason}"
    elif not path.is_file():
        what = "is not a regular file" if path.exists() else "no such file"
        what = "is a folder, but data is a file" if path.is_dir() else what
        nearby = sibling(path, lambda other: other.is_file() and other.suffix in DATA_FILES)
    elif path.suffix not in DATA_FILES:
        what, allowed = "is not a supported type of file", ", ".join(DATA_FILES)
    else:
        try:
            file = look_at(path, prompt_column, row_check(whens))
        except UnreadableData as error:
            what = str(error)
    if what:
        return [Problem(what, key, given=given, allowed=allowed, nearest=nearby)], None
    column, names = "data.prompt_column", file.columns
    others = tuple(name for name in names if name != prompt_column)
    if file.records is not None or path.suffix == ".csv":  # else later records may have further columns
        context.columns[key] = others
    if prompt_column not in names:
        what, near = f"no such column in {path.name}", nearest(prompt_column, names)
        return [Problem(what, column, "", prompt_column, ", ".join(names), near)], file.records
    problems = unusable_columns(names, prompt_column, path.name, key, config.has_episodes)
    missing = [*missing_columns(whens, others, path.name)]
    problems += missing or ([file.misfit] if file.misfit is not None else [])
    if file.without_prompt:
        what = f"{file.without_prompt} of {path.name} has no prompt"
        problems.append(Problem(what, column, given=prompt_column))
    if file.media:
        problems.append(Problem(f"{file.media}, but grpox reads only text", key, given=given, allowed=CURE))
    return problems, file.records


def sibling(path: Path, fits: Callable[[Path], bool]) -> str:
    """Return the path in the same folder with the nearest name that `fits` accepts; empty if there is none."""
    if not path.parent.is_dir():
        return ""
    name = nearest(path.name, sorted(other.name for other in path.parent.iterdir() if fits(other)))
    return str(path.parent / name) if name else ""


def resolve_parameters(
    config: RunConfig, components: dict[str, BoundComponent], base_of: Callable[[str], Path]
) -> list[Problem]:
    """Make the input paths among components' parameters absolute, in `config` and in `components`, in place.

    Args:
        components: bound components by key.
        base_of: dotted key -> the folder against which a relative path given there resolves.

    Returns:
        a problem for each missing input.
    """
    problems: list[Problem] = []
    for key, kind, reference in selected(config):
        bound = components.get(key)
        if bound is None or bound.config is None:
            continue
        params = config.tracking[key.removeprefix("tracking.")] if kind == "observer" else reference.model_extra
        for field, info in type(bound.config).model_fields.items():
            marks = (*info.metadata, *_marks(info.annotation))
            what = next((each for each in marks if isinstance(each, Input)), None)
            given, name = getattr(bound.config, field), info.alias or field
            # The component resolves its own defaults.
            if what is None or given is None or not params or name not in params:
                continue
            place = f"{key}.{name}"
            may_be_hub_id = what in (Input.MODEL, Input.TOKENIZER)
            path = (input_path if may_be_hub_id else _absolute)(given, base_of(place))
            params[name] = path
            bound = replace(bound, config=bound.config.model_copy(update={field: path}))
            if may_be_hub_id:
                there = Path(path)
                # Components load adapters with their base model.
                sufficient = there.is_dir if what is Input.TOKENIZER else (there / ADAPTER_CONFIG).is_file
                problems += model_problems(place, path) if unreachable(there) or not sufficient() else []
            elif what is Input.CACHE:
                if obstacle := _obstacle(Path(path))[0]:
                    problems.append(Problem(obstacle, place, given=path))
            elif not Path(path).exists():
                near = sibling(Path(path), Path.exists)
                problems.append(Problem("no such file or folder", place, given=path, nearest=near))
        components[key] = bound
    return problems


def _marks(annotation: Any) -> Iterator[Any]:
    """Yield the metadata of `Annotated` types within an annotation."""
    yield from getattr(annotation, "__metadata__", ())
    for member in get_args(annotation):
        yield from _marks(member)


def unreachable(path: Path) -> str:
    """Return why `path` cannot be looked up, such as too long a name or a loop of links; else empty."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _obstacle(folder: Path) -> tuple[str, Path]:
    """Return why an absolute path cannot be a folder, else empty; and the part of it that exists."""
    if reason := unreachable(folder):
        return f"cannot be created: {reason}", folder
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.is_dir():
        return "", there
    return "is a file, not a folder" if there == folder else f"cannot be created: {there} is a file", there


def output_problems(context: CheckContext) -> Iterator[Problem]:
    """Find mistakes in the output folder of a run that writes one."""
    config = context.config
    if not context.trains:
        return
    if not config.output_dir.strip():
        yield Problem("is empty", "output_dir", given=repr(config.output_dir), allowed="a folder")
        return
    folder = Path(config.output_dir).absolute()
    what, there = _obstacle(folder)
    try:  # a file system may refuse what its permissions allow, such as /proc, or a name
        if not what:
            with TemporaryDirectory(prefix=".grpox-", dir=there) as trial:
                Path(trial, folder.relative_to(there)).mkdir(parents=True, exist_ok=True)
    except PermissionError:
        what = f"cannot be written: no permission to write in {there}"
    except OSError as error:
        what = f"cannot be created in {there}: {error.strerror}"
    if what:
        yield Problem(what, "output_dir", given=config.output_dir)
        return
    inputs: dict[str, str | None] = {"model.path": config.model.path, "data.path": config.data.path}
    inputs |= {} if config.evaluation is None else config.evaluation.set_paths
    allowed = "another output_dir, or a copy of this input elsewhere"
    for key, path in inputs.items():
        for name in SET_ASIDE:
            if path is not None and Path(path).is_relative_to(folder.resolve() / name):
                yield Problem(f"is in {name}/ of output_dir, which the run overwrites", key, "", path, allowed)


def hub_problems(config: HubConfig | None) -> Iterator[Problem]:
    """Find an invalid repository name or branch, which the hub would refuse only after training."""
    if config is None:
        return
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(config.repo)
        what = "" if "/" in config.repo else "has no owner"
    except HFValidationError as error:
        what = str(error).split(":")[0].rstrip(".")
    if what:
        yield Problem(what, "hub.repo", given=config.repo, allowed="user/name")
    if config.revision is not None and not config.revision.strip():
        yield Problem("is empty", "hub.revision", allowed="a branch's name, or null")
