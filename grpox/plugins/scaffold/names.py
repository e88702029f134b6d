"""The names of a new plugin: of its distribution, module, component and classes, all made of the one given."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from grpox.errors import ConfigError, Problem, nearest
from grpox.plugins.hookspecs import KINDS
from grpox.plugins.requirements import canonical_name

TEMPLATED = ("loss", "reward", "advantage", "correction", "generator", "observer")
"""The kinds of components that there are templates for."""
PREFIX = "grpox-"
_VALID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # PEP 508


@dataclass(frozen=True)
class Names:
    """What the parts of a new plugin are called."""

    kind: str
    distribution: str
    """``grpox-mine``: what pip installs, and the folder."""
    component: str
    """``mine``: what a run file says."""

    @property
    def module(self) -> str:
        """``grpox_mine``: what Python imports."""
        return self.distribution.replace("-", "_")

    @property
    def class_name(self) -> str:
        """``MineLoss``; ``Loss3Point`` for ``3-point``, as a class may not begin with a digit."""
        words = "".join(part.capitalize() for part in self.component.split("-"))
        kind = self.kind.capitalize()
        if words[0].isdigit():
            return kind + words
        return words if words.endswith(kind) else words + kind

    @property
    def hook(self) -> str:
        """``grpox_losses``."""
        return KINDS[self.kind]


def names_of(given: str, kind: str) -> Names:
    """The names that follow from the one given: ``mine``, ``grpox-mine`` and ``Grpox_Mine`` mean the same.

    Raises:
        ConfigError: it is no name of a distribution, it is grpox's own, or there is no template of this kind.
    """
    problems = []
    if kind not in TEMPLATED:
        near, allowed = nearest(kind, TEMPLATED), ", ".join(TEMPLATED)
        what = "there is no template for this kind" if kind in KINDS else "no such kind"
        problems.append(Problem(what, "--kind", given=kind, allowed=allowed, nearest=near))
    if not _VALID.fullmatch(given):
        allowed = "letters, digits and, between them, - _ and ."
        problems.append(
            Problem("is no name of a distribution", "NAME", given=given, allowed=allowed, nearest=_near(given))
        )
    elif canonical_name(given) == "grpox":
        problems.append(
            Problem("is the name of grpox itself", "NAME", given=given, allowed="another, such as grpox-mine")
        )
    if problems:
        raise ConfigError(problems)
    component = canonical_name(given).removeprefix(PREFIX)
    return Names(kind, PREFIX + component, component)


def _near(given: str) -> str:
    """The valid name that looks most like `given`: that of the folder where it is a path; perhaps empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(given).name).strip("-._")
