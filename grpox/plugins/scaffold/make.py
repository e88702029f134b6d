"""Writes a new plugin's distribution out of templates, over nothing that would be lost.

``templates/common`` holds what all kinds share, and ``templates/KIND`` the rest. In a template's path, MODULE
and COMPONENT are replaced, ``dot-`` becomes a dot and ``.tmpl`` falls away; its text is a `string.Template`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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


def values_of(given: str, kind: str) -> dict[str, str]:
    """Derive the values of the templates from a name; ``mine``, ``grpox-mine`` and ``Grpox_Mine`` are one.

    Returns:
        variable of the templates -> text; among them ``distribution``, the name for pip and of the folder
        (``grpox-mine``), ``component``, the name in a run file (``mine``), ``module`` (``grpox_mine``), and
        ``train``, the command that trains the quickstart with the component.

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
    component, capital = canonical_name(given).removeprefix(PREFIX), kind.capitalize()
    words = "".join(part.capitalize() for part in component.split("-"))
    # ``Loss3Point`` for ``3-point``, as a class may not begin with a digit
    with_kind = capital + words if words[0].isdigit() else words.removesuffix(capital) + capital
    return {
        "kind": kind,
        "Kind": capital,
        "a_kind": with_article(kind),
        "distribution": PREFIX + component,
        "module": (PREFIX + component).replace("-", "_"),
        "component": component,
        "Class": with_kind,
        "hook": KINDS[kind],
        "train": f"grpox train quickstart {TRAIN.get(kind, f'{kind}={{}}').format(component)}",
        "run_file": RUN_FILE.get(kind, f"{kind}: {{}}").format(component),
        "api": str(API_VERSION),
        "grpox": ".".join(__version__.split(".")[:2]),
    }


def make(values: Mapping[str, str], parent: Path, plugins: PluginSet, force: bool = False) -> list[str]:
    """Write the distribution of a new plugin into a folder of its name within `parent`; return its files.

    Args:
        values: see `values_of`.
        plugins: the installed plugins, whose names are reserved.
        force: write over the files of a folder that is not empty; others in it stay.

    Raises:
        ConfigError: a name is taken, the folder is not empty, or it cannot be written.
    """
    folder = parent / values["distribution"]
    problems = list(_clashes(values, plugins, force))
    try:
        if not force and folder.is_dir() and any(folder.iterdir()):
            allowed = "another --folder, or --force to write over the files of that name"
            problems.append(Problem("is there and not empty", given=str(folder), allowed=allowed))
        if problems:
            raise ConfigError(problems)
        files = _rendered(values)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        there = isinstance(error, FileExistsError | NotADirectoryError)
        what = "is not a folder" if there else f"cannot be written: {error.strerror or error}"
        raise ConfigError(what, given=str(error.filename or folder)) from error
    return list(files)


def _clashes(values: Mapping[str, str], plugins: PluginSet, force: bool) -> Iterator[Problem]:
    """Yield a problem for each name that is in use; with `force` the installed distribution is made anew."""
    kind, component, module = values["kind"], values["component"], values["module"]
    for offer in plugins.offers_called(f"{kind}/{component}"):
        if canonical_name(offer.distribution) != values["distribution"]:
            what = f"{offer.origin} already offers a {kind} '{component}'"
            allowed = f"another name: runs would have to say {values['distribution']}:{component}"
            yield Problem(what, "NAME", given=component, allowed=allowed)
    if not force and util.find_spec(module) is not None:
        what = "a module of this name is installed, which the plugin's own would hide"
        allowed = "another name, or --force to write it anew"
        yield Problem(what, "NAME", given=module, allowed=allowed)


def _rendered(values: Mapping[str, str]) -> dict[str, str]:
    """Fill in the templates: path within the distribution -> text, in the order of paths."""
    files = {}
    root = Path(str(resources.files("grpox.plugins.scaffold"))) / "templates"
    for folder in (root / "common", root / values["kind"]):
        for template in folder.rglob("*.tmpl"):
            path = template.relative_to(folder).as_posix().removesuffix(".tmpl")
            path = path.replace("MODULE", values["module"])
            path = path.replace("COMPONENT", values["component"].replace("-", "_"))
            path = re.sub(r"(^|/)dot-", r"\1.", path)
            files[path] = Template(template.read_text(encoding="utf-8")).substitute(values)
    return dict(sorted(files.items()))
