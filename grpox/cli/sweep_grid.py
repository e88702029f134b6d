"""The grid of a sweep, such as ``train.learning_rate=1e-6,1e-5``, and the folder and config of each run."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.config import RunConfig
from grpox.errors import ConfigError, Problem
from grpox.errors.redaction import names_a_secret, redact
from grpox.observing.record import began
from grpox.runfile.load import load_run
from grpox.runfile.overrides import COMMAND_LINE
from grpox.runfile.yaml_lines import read_yaml
from grpox.runtime.files import read_mapping

SEED = "train.seed"
LONGEST_NAME = 100
"""Longest name of a run's folder in characters; file systems allow 255 bytes."""


@dataclass(frozen=True)
class Grid:
    """Settings of the runs of a sweep."""

    axes: Mapping[str, tuple[str, ...]]
    """Key -> values as YAML, of each key that differs between runs."""
    names: Mapping[str, str]
    """Key of an axis -> name in tables and folders: its last part, or the whole key where two share it.
    ``rewards.0.weight`` is kept whole, as the reward matters."""
    runs: Sequence[tuple[Mapping[str, str], Sequence[str]]]
    """Setting of each run, key -> value, and its overrides; the last axis changes fastest."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    """Name of the run's folder and log: ``learning_rate=1e-6_seed=0``."""
    setting: Mapping[str, str]
    """Key of an axis -> value of this run, as typed."""
    overrides: tuple[str, ...]
    folder: Path
    config: RunConfig

    @property
    def log(self) -> Path:
        """File with the run's output; beside its folder, because the run may move files out of the folder."""
        return self.folder.with_name(f"{self.name}.log")

    def summary(self) -> dict[str, Any] | None:
        """Read ``summary.json``; None unless the run is complete and has exactly this config."""
        summary = read_mapping(self.folder / "summary.json")
        return summary if summary and began(self.config) else None


def read_grid(arguments: Sequence[str], seeds: str | None) -> Grid:
    """Read overrides, some with several values, and the seeds, which are the last axis.

    Raises:
        ConfigError: no key has several values, a key has a value twice, or a key comes twice; lists all.
    """
    # Pairs of key and value, of which each run has one; an override of all runs, ``key=value``, has no key.
    choices: list[list[tuple[str, str]]] = []
    for argument in arguments:
        key, _, text = argument.partition("=")
        values = split_values(text) if key.strip() else ()
        pairs = [(_normal(key), value) for value in values]
        choices.append(pairs if len(pairs) > 1 else [("", argument)])
    if seeds is not None:
        choices.append([(SEED, value) for value in split_values(seeds)])
    axes = {pairs[0][0]: tuple(value for _, value in pairs) for pairs in choices if pairs[0][0]}
    keys = [key or _normal(text.partition("=")[0]) for (key, text), *_ in choices]
    if problems := list(_problems(axes, keys)):
        raise ConfigError(problems)
    short = {key: re.sub(r"^(?!.*\.\d).*\.", "", key) for key in axes}
    counts = Counter(short.values())
    names = {key: name if counts[name] == 1 else key for key, name in short.items()}
    runs = [
        (
            {key: value for key, value in pairs if key},
            [f"{key}={value}" if key else value for key, value in pairs],
        )
        for pairs in itertools.product(*choices)
    ]
    return Grid(axes, names, runs)


def split_values(text: str) -> tuple[str, ...]:
    """Split `text` at its commas, except within quotes or brackets.

    ``1e-6,1e-5`` has two values, ``[a,b]`` and ``"a,b"`` one, ``{name: dapo, clip_high: 0.3},grpo`` two.
    """
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and values[-1].rstrip()[-1:] in ("", *"[{,:"):  # not within a word: don't
            quote = character
        elif character == "," and depth <= 0:
            values.append("")
            continue
        else:
            depth += (character in "[{") - (character in "]}")
        values[-1] += character
    return tuple(value.strip() for value in values)


def _normal(key: str) -> str:
    return re.sub(r"\[(\d+)\]", r".\1", key.strip())


def _problems(axes: Mapping[str, tuple[str, ...]], keys: Sequence[str]) -> Iterator[Problem]:
    if not axes:
        what = "no key has several values, so there is nothing to sweep"
        allowed = "for example train.learning_rate=1e-6,1e-5, or --seeds 0,1,2"
        yield Problem(what, where=COMMAND_LINE, allowed=allowed)
    for key, values in axes.items():
        text, what, allowed = ",".join(values), "", ""
        if keys.count(key) > 1:
            also = ", or --seeds alone" if key == SEED else ""
            yield Problem("is given twice", key, COMMAND_LINE, allowed=f"{key}=VALUE,VALUE,... once{also}")
        if key == "output_dir":
            what, text = "cannot be swept: every run has its own folder within the sweep's folder", ""
            allowed = "--dir DIR, or one output_dir"
        elif names_a_secret(key) or any(redact(value) != value for value in values):
            what, text = "a secret cannot be swept, because the values name the runs' folders", ""
            allowed = f"{key} in the run file"
        elif "" in values:
            what, allowed = "a value between the commas is empty", 'a value; an empty text is ""'
        elif any(_read(key, one) == _read(key, other) for one, other in itertools.combinations(values, 2)):
            what = "has the same value twice"
        if what:
            yield Problem(what, key, COMMAND_LINE, text, allowed)


def _read(key: str, text: str) -> object:
    """Parse a value; text that is not YAML stays as it is, and the check of the run reports it."""
    try:
        return read_yaml(text, key).data
    except ConfigError:
        return text


def plan_trials(run: str, grid: Grid, folder: Path | None, world_size: int) -> tuple[Path, list[Trial]]:
    """Name the runs of a sweep, and check each one like `grpox validate`.

    Args:
        folder: the sweep's folder; default: the run's output_dir with the suffix ``-sweep``.
        world_size: ranks of each run.

    Returns:
        The sweep's folder and its runs.

    Raises:
        ConfigError: lists the problems of all runs, each once.
    """
    problems: dict[str, Problem] = {}
    trials: list[Trial] = []
    if folder is None:
        first = load_run(run, grid.runs[0][1], world_size).config
        folder = Path(f"{first.output_dir}-sweep")
    for setting, of_setting in grid.runs:
        name = _name(grid, setting)
        output = json.dumps(str(folder / name), ensure_ascii=False)  # YAML reads it back unchanged
        overrides = (*of_setting, f"output_dir={output}")
        try:
            config = load_run(run, overrides, world_size).config
            trials.append(Trial(name, setting, overrides, folder / name, config))
        except ConfigError as error:
            problems |= {str(problem): problem for problem in error.problems}
    if problems:
        raise ConfigError(list(problems.values()))
    return folder, trials


def _name(grid: Grid, setting: Mapping[str, str]) -> str:
    """Name a run's folder by its setting, valid in file systems and shells: ``loss=dapo_seed=1``.

    A name that is not exactly the setting ends with a digest of it, so that settings do not share a folder.
    Adding a value to the grid later does not change the name.
    """
    whole = "_".join(f"{grid.names[key]}={value}" for key, value in setting.items())
    name = re.sub(r"[^A-Za-z0-9._+=-]+", "-", whole).replace("=-", "=").strip("-.")
    if name == whole and len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
