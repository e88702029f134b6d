"""The grid of a sweep: ``train.learning_rate=1e-6,1e-5`` -> the settings of each run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpox.errors import ConfigError, Problem
from grpox.errors.redaction import names_a_secret, redact
from grpox.runfile.overrides import COMMAND_LINE
from grpox.runfile.yaml_lines import read_yaml

SEED = "train.seed"
OUTPUT = "output_dir"


@dataclass(frozen=True)
class Axis:
    """A key of the run file and the values that it takes, each as YAML that a user could have typed."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """What differs between the runs of a sweep, and what all of them are given."""

    given: tuple[Axis | str, ...]
    """In the order of the command line, by which a later one wins: axes, and overrides ``key=value`` of all."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(each for each in self.given if isinstance(each, Axis))

    def overrides(self, setting: Mapping[str, str]) -> list[str]:
        """What the run of a setting is given, ``key=value`` each."""
        return [each if isinstance(each, str) else f"{each.key}={setting[each.key]}" for each in self.given]

    @property
    def names(self) -> dict[str, str]:
        """Key -> what tables and folders call it: its last part, or all of it where that would not tell."""
        short = {axis.key: _short(axis.key) for axis in self.axes}
        names = list(short.values())
        return {key: name if names.count(name) == 1 else key for key, name in short.items()}

    def settings(self) -> Iterator[Mapping[str, str]]:
        """Key -> value, for every run; the last axis changes fastest."""
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield {axis.key: value for axis, value in zip(self.axes, values, strict=True)}


def read_grid(arguments: Sequence[str], seeds: str | None) -> Grid:
    """Overrides of which some have several values, and the seeds, which are the last axis.

    Raises:
        ConfigError: no key has several values, one has the same value twice, or comes twice; all that is wrong.
    """
    given: list[Axis | str] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        values = split_values(text)
        several = bool(equals and key.strip() and len(values) > 1)
        given.append(Axis(_normal(key), tuple(values)) if several else argument)
    if seeds is not None:
        given.append(Axis(SEED, tuple(split_values(seeds))))
    grid = Grid(tuple(given))
    if problems := list(_problems(grid)):
        raise ConfigError(problems)
    return grid


def split_values(text: str) -> list[str]:
    """The values between the commas of `text`; a comma within quotes or brackets belongs to its value.

    ``1e-6,1e-5`` has two, ``[a,b]`` and ``"a,b"`` one, ``{name: dapo, clip_high: 0.3},grpo`` two.
    """
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and _begins_quote(values[-1]):
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth <= 0:
            values.append("")
            continue
        values[-1] += character
    return [value.strip() for value in values]


def _begins_quote(before: str) -> bool:
    """Whether a quote after `before` opens a text: within a word, as in ``don't``, it does not."""
    return not before.strip() or before.rstrip()[-1] in "[{,:"


def _short(key: str) -> str:
    """``learning_rate`` of ``train.learning_rate``; ``rewards.0.weight`` as it is: which reward matters."""
    return key if re.search(r"\.\d", key) else key.rpartition(".")[2]


def _normal(key: str) -> str:
    return re.sub(r"\[(\d+)\]", r".\1", key.strip())


def _problems(grid: Grid) -> Iterator[Problem]:
    if not grid.axes:
        example = "for example train.learning_rate=1e-6,1e-5, or --seeds 0,1,2"
        yield Problem(
            "no key has several values: there is nothing to sweep", where=COMMAND_LINE, allowed=example
        )
    keys = [each.key if isinstance(each, Axis) else _normal(each.partition("=")[0]) for each in grid.given]
    for key in dict.fromkeys(axis.key for axis in grid.axes):
        if keys.count(key) > 1:
            also = ", or --seeds alone" if key == SEED else ""
            yield Problem("is given twice", key, COMMAND_LINE, allowed=f"{key}=VALUE,VALUE,... once{also}")
    for axis in grid.axes:
        yield from _axis_problems(axis)


def _axis_problems(axis: Axis) -> Iterator[Problem]:
    if axis.key == OUTPUT:
        what = "cannot be swept: every run has a folder of its own in the sweep's"
        yield Problem(what, OUTPUT, COMMAND_LINE, allowed="--dir DIR, or one output_dir")
    if names_a_secret(axis.key) or any(redact(value) != value for value in axis.values):
        what = "a secret cannot be swept: the runs' folders are named by the values"
        yield Problem(what, axis.key, COMMAND_LINE, allowed=f"{axis.key} in the run file")
    if "" in axis.values:
        what = "one of the values between the commas is empty"
        yield Problem(what, axis.key, COMMAND_LINE, ",".join(axis.values), 'a value; an empty text is ""')
    if axis.key == SEED and not all(value.isdecimal() for value in axis.values):
        what = "seeds are whole numbers from 0"
        yield Problem(what, SEED, COMMAND_LINE, ",".join(axis.values), "for example --seeds 0,1,2")
    read = [_read(axis.key, value) for value in axis.values]
    if any(value in read[:place] for place, value in enumerate(read)):
        yield Problem("has the same value twice", axis.key, COMMAND_LINE, ",".join(axis.values))


def _read(key: str, text: str) -> object:
    """The value; of text that is no YAML the text itself, which is told when the run is checked."""
    try:
        return read_yaml(text, key).data
    except ConfigError:
        return text
