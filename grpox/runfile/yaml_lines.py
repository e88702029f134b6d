"""Reads YAML into plain data with the line of each key, and writes it.

Scalars follow the YAML 1.2 core schema rather than PyYAML's YAML 1.1: ``1e-6`` is a number, ``no`` and
``2026-01-31`` are text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from grpox.errors import ConfigError, Problem, join, plain

LONGEST = 2**16
"""Longest document in characters: a run file has a few thousand, and parsing this many takes a second."""
MOST_VALUES = 20_000
"""Largest number of values in a document with expanded aliases: a few lines can stand for billions."""
DEEPEST = 100
"""Deepest nesting of lists and mappings; a run file needs five or six levels."""
MOST_DIGITS = 4000
"""Largest number of digits of an integer; Python reads a few more."""
_TAG = "tag:yaml.org,2002:"
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that escapes such as ``"\\0"`` can write, but that are invalid in paths and files."""


_FORMS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}
"""Type of plain scalars -> form of its texts."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's implicit types."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own
        None: [(_TAG + name, re.compile(rf"(?:{form})\Z")) for name, form in _FORMS.items()]
    }


@dataclass
class Document:
    """A YAML document: the data, and the line (from 1) of each dotted key such as ``rewards[0].weight``."""

    data: Any
    lines: dict[str, int] = field(default_factory=dict)


def read_yaml(text: str, source: str) -> Document:
    """Parse one YAML document.

    Args:
        source: name of the document in problems, for example ``run.yaml``.

    Raises:
        ConfigError: the document is not YAML or longer than `LONGEST`; or, all at once, keys given twice, keys
            that are not text, invalid numbers and tags of objects.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"is longer than {LONGEST} characters", where=source)
    reader = _Reader(source)
    try:
        node = _Loader(text).get_single_node()
        data = None if node is None else reader.value(node, "", ())
        if reader.problems:
            raise ConfigError(reader.problems)
        return Document(data, reader.lines)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{source}:{before.count(chr(10)) + 1}:{error.position - before.rfind(chr(10))}"
        what = f"not valid YAML: the character U+{error.character:04X} is not allowed in a text file"
        raise ConfigError(what, where=where) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"not valid YAML: {what}", where=where) from error
    except RecursionError as error:
        raise ConfigError("lists or mappings are nested too deeply", where=source) from error


def read_text(path: Path, source: str, longest: int) -> str:
    """Read up to `longest` characters of a user's text file.

    Raises:
        ConfigError: the file cannot be read, or is not text.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(longest)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error}", where=source) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=source) from error


def read_table(package: str, name: str) -> Any:
    """Read a data file of a package of grpox."""
    return read_yaml(resources.files(package).joinpath(name).read_text(encoding="utf-8"), name).data


def leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all scalars and empty mappings and lists in `data`."""
    if isinstance(data, Mapping | list) and data:
        for name, value in data.items() if isinstance(data, Mapping) else enumerate(data):
            yield from leaves(value, join(key, name))
    else:
        yield key, data


class _Reader:
    """Turns nodes into data, recording the lines of keys and collecting problems."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self.values = 0

    def value(self, node: yaml.Node, key: str, above: tuple[yaml.Node, ...]) -> Any:
        """Return the data of `node`, the value of `key` within the nodes `above`."""
        self.values += 1
        if self.values > MOST_VALUES:
            what = f"its aliases (*name) expand to more than {MOST_VALUES} values"
            raise ConfigError(what, where=self.source)
        if len(above) > DEEPEST:
            raise RecursionError
        if node in above:
            return self._refuse(node, key, "an alias to something that contains it")
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, key, (*above, node))
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            self.lines |= {join(key, index): item.start_mark.line + 1 for index, item in enumerate(node.value)}
            return [self.value(item, join(key, index), (*above, node)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key)
        return self._refuse(node, key, f"the tag {node.tag.replace(_TAG, '!!')} is not supported")

    def _mapping(self, node: yaml.MappingNode, key: str, above: tuple[yaml.Node, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                # In a list of anchors, the first one wins.
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    merged = self.value(source, key, above)
                    if not isinstance(merged, dict):
                        self._refuse(value_node, key, "<< needs a mapping or a list of mappings")
                        continue
                    result |= {name: each for name, each in merged.items() if name not in result}
                continue
            # A key that looks like an integer or null is read as text, which the schema refuses.
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, key, "a key must be text")
                continue
            name = key_node.value
            dotted = join(key, name)
            if name in own:
                self._refuse(key_node, dotted, f"key given twice, first on line {own[name]}")
                continue
            own[name] = self.lines[dotted] = key_node.start_mark.line + 1
            result[name] = self.value(value_node, dotted, above)
        return result

    def _scalar(self, node: yaml.ScalarNode, key: str) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind in _FORMS and not re.fullmatch(_FORMS[kind], text):
            # Only an explicit tag comes here, such as `!!bool yes`.
            return self._refuse(node, key, f"{text!r} is not of the type !!{kind}")
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int" if len(text) > MOST_DIGITS:
                what = f"a number of {len(text)} digits; at most {MOST_DIGITS} are allowed"
                return self._refuse(node, key, what)
            case "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            case "float":
                number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
                if math.isfinite(number) or text.lower().endswith(".inf"):
                    return number
                too_large = f"{plain(text, 50)} is too large a number"
                return self._refuse(node, key, f"{text} is not a number" if math.isnan(number) else too_large)
            case "str" if unusable := _UNUSABLE.search(text):
                return self._refuse(node, key, f"the character U+{ord(unusable.group()):04X} cannot be used")
            case "str":
                return text
            case _:
                return self._refuse(node, key, f"the tag {node.tag.replace(_TAG, '!!')} is not supported")

    def _refuse(self, node: yaml.Node, key: str, what: str) -> Any:
        where = f"{self.source}:{node.start_mark.line + 1}"
        self.problems.append(Problem(what, key=key, where=where))


class Dumper(yaml.SafeDumper):
    """PyYAML's dumper, with quotes around texts that are numbers only in YAML 1.2, such as ``1e-6``."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    is_number = any(re.fullmatch(_FORMS[kind], value) for kind in ("int", "float"))
    return dumper.represent_scalar(f"{_TAG}str", value, style='"' if is_number else None)


Dumper.add_representer(str, _text)


def inline(value: Any) -> str:
    """Write a value on one line."""
    text: str = yaml.dump(
        [value], Dumper=Dumper, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True
    )
    return text.strip()[1:-1]
