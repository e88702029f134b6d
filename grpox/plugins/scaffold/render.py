"""Templates -> the files of a new plugin.

``templates/common`` holds what all kinds share, and ``templates/KIND`` the rest. In a template's path, MODULE
and COMPONENT are replaced, ``dot-`` becomes a dot and ``.tmpl`` falls away; its text is a `string.Template`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path, PurePosixPath
from string import Template

from grpox import __version__
from grpox.plugins.hookspecs import API_VERSION
from grpox.plugins.scaffold.names import Names

TRAIN = {
    "loss": "grpox train quickstart loss={}",
    "reward": "grpox train quickstart 'rewards=[exact, {}]'",
    "advantage": "grpox train quickstart advantage={}",
    "correction": "grpox train quickstart correction={}",
    "generator": "grpox train quickstart generator={}",
    "observer": "grpox train quickstart 'tracking.{}={{}}'",
}
"""Kind -> the command that trains the quickstart with a component of it."""
RUN_FILE = {
    "reward": "rewards: [{{name: {}, weight: 1.0}}]",
    "observer": "tracking: {{{}: {{}}}}",
}
"""Kind -> the line of a run file, where that is not ``KIND: NAME``."""


def rendered(names: Names) -> dict[str, str]:
    """Path within the distribution -> text, in the order of paths."""
    values = placeholders(names)
    files = {_target(path, names): Template(text).substitute(values) for path, text in _templates(names.kind)}
    return dict(sorted(files.items()))


def placeholders(names: Names) -> dict[str, str]:
    """What the templates may hold: name -> text."""
    return {
        "kind": names.kind,
        "Kind": names.kind.capitalize(),
        "a_kind": f"an {names.kind}" if names.kind[0] in "aeiou" else f"a {names.kind}",
        "distribution": names.distribution,
        "module": names.module,
        "component": names.component,
        "Class": names.class_name,
        "hook": names.hook,
        "train": train_command(names),
        "run_file": RUN_FILE.get(names.kind, f"{names.kind}: {{}}").format(names.component),
        "api": str(API_VERSION),
        "grpox": ".".join(__version__.split(".")[:2]),
    }


def train_command(names: Names) -> str:
    """The command that trains the quickstart with the component."""
    return TRAIN[names.kind].format(names.component)


def _templates(kind: str) -> Iterator[tuple[PurePosixPath, str]]:
    root = Path(str(resources.files("grpox.plugins.scaffold"))) / "templates"
    for folder in (root / "common", root / kind):
        for path in folder.rglob("*.tmpl"):
            yield PurePosixPath(path.relative_to(folder).as_posix()), path.read_text(encoding="utf-8")


def _target(template: PurePosixPath, names: Names) -> str:
    module, component = names.module, names.component.replace("-", "_")
    path = str(template.with_suffix("")).replace("MODULE", module).replace("COMPONENT", component)
    return "/".join(
        part.replace("dot-", ".", 1) if part.startswith("dot-") else part for part in path.split("/")
    )
