"""Writes a new plugin's distribution out of templates, over nothing that would be lost.

``templates/common`` holds what all kinds share, and ``templates/KIND`` the rest. In a template's path, MODULE
and COMPONENT are replaced, ``dot-`` becomes a dot and ``.tmpl`` falls away; its text is a `string.Template`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path, PurePath
from string import Template

from grpox import __version__
from grpox.errors import ConfigError, Problem, nearest
from grpox.errors.formatting import with_article
from grpox.plugins.discovery import PluginSet
from grpox.plugins.hookspecs import API_VERSION, KINDS
from grpox.plugins.requirements import canonical_name

TRAIN = {
    "reward": "'rewards=[exact, {}]'",
    "environment": (
        "environment={} 'rewards=[environment]' sampling.max_completion_length=16 episodes.max_turn_tokens=4"
    ),
    "observer": "'tracking.{}={{}}'",
    "dataset": "data.path=null data.source={}",
    "optimizer": "train.optimizer={}",
    "scheduler": "train.scheduler={}",
}
"""Kind -> the overrides that train the quickstart with a component of it, where they are not ``KIND=NAME``."""
RUN_FILE = {
    "reward": "rewards: [{{name: {}, weight: 1.0}}]",
    "observer": "tracking: {{{}: {{}}}}",
    "dataset": "data: {{source: {}}}",
    "optimizer": "train: {{optimizer: {}}}",
    "scheduler": "train: {{scheduler: {}}}",
}
"""Kind -> the line of a run file, where that is not ``KIND: NAME``."""
PREFIX = "grpox-"
_VALID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # PEP 508


@dataclass(frozen=True)
class Names:
    """Names of the parts of a new plugin."""

    kind: str
    distribution: str
    """Name for pip, and of the folder: ``grpox-mine``."""
    component: str
    """Name in a run file: ``mine``."""

    @property
    def module(self) -> str:
        """Name for Python's import: ``grpox_mine``."""
        return self.distribution.replace("-", "_")

    @property
    def class_name(self) -> str:
        """Name of the class: ``MineLoss``; ``Loss3Point`` for ``3-point``, as it may not begin with a digit."""
        words = "".join(part.capitalize() for part in self.component.split("-"))
        kind = self.kind.capitalize()
        if words[0].isdigit():
            return kind + words
        return words if words.endswith(kind) else words + kind

    @property
    def train_command(self) -> str:
        """The command that trains the quickstart with the component."""
        overrides = TRAIN.get(self.kind, f"{self.kind}={{}}")
        return f"grpox train quickstart {overrides.format(self.component)}"


def names_of(given: str, kind: str) -> Names:
    """Derive all names from one: ``mine``, ``grpox-mine`` and ``Grpox_Mine`` mean the same.

    Raises:
        ConfigError: it is no name of a distribution, it is grpox's own, or the kind does not exist.
    """
    problems = []
    if kind not in KINDS:
        near, allowed = nearest(kind, KINDS), ", ".join(KINDS)
        problems.append(Problem("no such kind", "--kind", given=kind, allowed=allowed, nearest=near))
    if not _VALID.fullmatch(given):
        # Of a path, the name of its folder; perhaps empty.
        near = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(given).name).strip("-._")
        allowed = "letters, digits and, between them, - _ and ."
        what = "is no name of a distribution"
        problems.append(Problem(what, "NAME", given=given, allowed=allowed, nearest=near))
    elif canonical_name(given) == "grpox":
        what, allowed = "is the name of grpox itself", "another, such as grpox-mine"
        problems.append(Problem(what, "NAME", given=given, allowed=allowed))
    if problems:
        raise ConfigError(problems)
    component = canonical_name(given).removeprefix(PREFIX)
    return Names(kind, PREFIX + component, component)


def make(names: Names, parent: Path, plugins: PluginSet, force: bool = False) -> list[str]:
    """Write the distribution of a new plugin into a folder of its name within `parent`; return its files.

    Args:
        plugins: the installed plugins, whose names are reserved.
        force: write over the files of a folder that is not empty; others in it stay.

    Raises:
        ConfigError: a name is taken, the folder is not empty, or it cannot be written.
    """
    folder = parent / names.distribution
    problems = list(_clashes(names, plugins, force))
    try:
        if not force and folder.is_dir() and any(folder.iterdir()):
            allowed = "another --folder, or --force to write over the files of that name"
            problems.append(Problem("is there and not empty", given=str(folder), allowed=allowed))
        if problems:
            raise ConfigError(problems)
        files = _rendered(names)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        there = isinstance(error, FileExistsError | NotADirectoryError)
        what = "is not a folder" if there else f"cannot be written: {error.strerror or error}"
        raise ConfigError(what, given=str(error.filename or folder)) from error
    return list(files)


def _clashes(names: Names, plugins: PluginSet, force: bool) -> Iterator[Problem]:
    """Yield a problem for each name that is in use; with `force` the installed distribution is made anew."""
    for offer in plugins.offers_called(names.component, names.kind):
        if canonical_name(offer.distribution) != names.distribution:
            what = f"{offer.origin} already offers a {names.kind} '{names.component}'"
            allowed = f"another name: runs would have to say {names.distribution}:{names.component}"
            yield Problem(what, "NAME", given=names.component, allowed=allowed)
    if not force and util.find_spec(names.module) is not None:
        what = "a module of this name is installed, which the plugin's own would hide"
        allowed = "another name, or --force to write it anew"
        yield Problem(what, "NAME", given=names.module, allowed=allowed)


def _rendered(names: Names) -> dict[str, str]:
    """Fill in the templates: path within the distribution -> text, in the order of paths."""
    kind, component = names.kind, names.component
    values = {
        "kind": kind,
        "Kind": kind.capitalize(),
        "a_kind": with_article(kind),
        "distribution": names.distribution,
        "module": names.module,
        "component": component,
        "Class": names.class_name,
        "hook": KINDS[kind],
        "train": names.train_command,
        "run_file": RUN_FILE.get(kind, f"{kind}: {{}}").format(component),
        "api": str(API_VERSION),
        "grpox": ".".join(__version__.split(".")[:2]),
    }
    files = {}
    root = Path(str(resources.files("grpox.plugins.scaffold"))) / "templates"
    for folder in (root / "common", root / kind):
        for template in folder.rglob("*.tmpl"):
            path = template.relative_to(folder).as_posix().removesuffix(".tmpl")
            path = path.replace("MODULE", names.module).replace("COMPONENT", component.replace("-", "_"))
            path = re.sub(r"(^|/)dot-", r"\1.", path)
            files[path] = Template(template.read_text(encoding="utf-8")).substitute(values)
    return dict(sorted(files.items()))
